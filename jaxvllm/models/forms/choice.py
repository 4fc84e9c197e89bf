"""`Forms`: the form of every matrix of a model, as the platform and the user choose it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
from jax.sharding import NamedSharding

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.cpu_kernel import CpuKernel
from jaxvllm.models.forms.form import Form
from jaxvllm.models.forms.gpu_experts import GpuExperts
from jaxvllm.models.forms.int8 import int8_form
from jaxvllm.models.forms.plain import PLAIN
from jaxvllm.models.forms.tpu_experts import TpuExperts
from jaxvllm.models.forms.turned import Turned, prefers_turned
from pallas_kernels.backend import Backend
from pallas_kernels.chips import CpuChip, GpuChip, TpuChip

# What users may choose by name, made for a CPU on which our own kernels run, or for none.
QUANTIZATIONS: Mapping[str, Callable[[CpuChip | None], Form]] = {"int8": int8_form}


@dataclass(frozen=True)
class Forms:
    """The forms of a model's matrices.

    layers: of the matrices of all layers
    head: of an LM head of its own
    table: of an embedding that is the LM head too
    experts: of the experts of all layers
    """

    layers: Form = PLAIN
    head: Form = PLAIN
    table: Form = PLAIN
    experts: Form = PLAIN

    @classmethod
    def chosen(cls, quantization: str | None, backend: Backend, may_turn: bool) -> Self:
        """Returns the forms for the kernels of `backend`. For the reference XLA multiplies.

        `may_turn` says that the model is on one CPU, whose layers have arrays of their own. A quantization is that of
        the layers. The head keeps its dtype, as in vLLM: its errors would be those of the logits.
        """
        chip = backend.chip if isinstance(backend.chip, CpuChip) else None
        usual: Form = PLAIN
        if chip is not None:
            usual = CpuKernel(chip)
        elif may_turn and prefers_turned():
            usual = Turned()
        layers = usual if quantization is None else QUANTIZATIONS[quantization](chip)
        # An expert is multiplied by few rows, and one that is turned ten times slower (CPU, 32 experts of 512 x 256).
        experts = PLAIN if isinstance(layers, Turned) else layers
        if quantization is None and isinstance(backend.chip, TpuChip):
            experts = TpuExperts(backend.chip, backend.interpret)
        elif quantization is None and isinstance(backend.chip, GpuChip):
            experts = GpuExperts(backend.chip, backend.interpret)
        return cls(layers, usual, PLAIN if isinstance(usual, Turned) else usual, experts)

    def of(self, decl: ParamDecl, is_of_layer: bool) -> Form:
        """Returns the form of the array with this declaration, of a layer or outside the layers."""
        if decl.storage == "tied_table":
            return self.table
        if decl.storage == "experts":
            return self.experts
        if decl.storage == "matrix":
            # An array that declares a dtype, such as a router, is never quantized.
            return self.layers if is_of_layer and decl.dtype is None else self.head
        return PLAIN

    def kept(
        self, array: jax.Array, decl: ParamDecl, is_of_layer: bool, sharding_of: Callable[[ParamDecl], NamedSharding]
    ) -> Any:
        """Returns the node of the tree that keeps `array`, which is on its devices already."""
        form = self.of(decl, is_of_layer)
        shardings = {name: sharding_of(part) for name, part in form.declare(decl).items()}
        return form.wrapped(form.keep(array, shardings))

    def node(self, decl: ParamDecl, is_of_layer: bool, array: Callable[[ParamDecl], Any]) -> Any:
        """Returns the node of the tree that keeps an array, with `array(declaration)` in the place of each array."""
        form = self.of(decl, is_of_layer)
        return form.wrapped({name: array(part) for name, part in form.declare(decl).items()})


PLAIN_FORMS = Forms()
