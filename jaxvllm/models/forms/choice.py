"""`Forms`: the form of every matrix of a model, as the platform and the user choose it.

Most forms are imported where they are chosen: an engine needs one or two of them, and the others took 20 ms of a start.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.cpu_kernel import CpuKernel
from jaxvllm.models.forms.few_bits import FewBits, StoredAs
from jaxvllm.models.forms.form import Form
from jaxvllm.models.forms.packed import Packed, PackedInSteps
from jaxvllm.models.forms.plain import PLAIN
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import CpuChip, GpuChip, TpuChip
from pallas_kernels.quantized_matmul.code import E4M3, INT8, UINT4

if TYPE_CHECKING:
    from jaxvllm.models.forms.cpu_groups import CpuGroups

# What users may choose by name. int4 takes 4.125 and 4.5 bits a weight.
QUANTIZATIONS: Mapping[str, StoredAs] = {
    "int8": StoredAs(INT8, None, "float32"),
    "fp8": StoredAs(E4M3, None, "float32"),
    "int4": StoredAs(UINT4, 128, "bfloat16"),
    "int4_g32": StoredAs(UINT4, 32, "bfloat16"),
    "int8_w8a8": StoredAs(INT8, None, "float32", rounds_tokens=True),
    "fp8_w8a8": StoredAs(E4M3, None, "float32", rounds_tokens=True),
}
# How CPUs keep the LM head beside layers that are rounded so. OpenVINO and llama.cpp round it to about as many bits.
# Of Qwen3 0.6B in int4 it would take 622 MB in float32, and all layers take 227: most of a decode step.
_HEAD = StoredAs(INT8, 32, "bfloat16")
_ROUNDS_HEAD = ("int8", "int4", "int4_g32")


# The name of a matrix and the number of its layer. None stands for outside the layers.
MatrixKey = tuple[str, int | None]


@dataclass(frozen=True)
class FewBitsForms:
    """Chooses the forms of matrices in few bits.

    backend: the kernels that multiply. Without them, XLA would write a matrix whose groups have scales in 16 bits
    by_tile: whether XLA may decode some rows of a matrix at a time, which it does on CPUs
    shards: the devices that a matrix is divided among
    """

    backend: Backend = REFERENCE
    by_tile: bool = False
    shards: int = 1

    @property
    def fills_groups_up(self) -> bool:
        """Whether the last group of a row may have fewer inputs than the others."""
        return self._gpu is not None

    @property
    def _gpu(self) -> GpuChip | None:
        """The GPU whose kernels multiply."""
        chip = self.backend.chip
        return chip if isinstance(chip, GpuChip) else None

    def of(self, stored: StoredAs, group: int | None, of_experts: bool = False) -> FewBits | None:
        """Returns the form of a matrix with groups of at most that size, or None where it has none.

        group: None stands for all that a device has of a row
        of_experts: whether rows are multiplied by experts of theirs. Our own kernels do that, and read the codes, also
        where XLA multiplies rows in few bits by a single matrix, because XLA would copy each expert
        """
        chip = self.backend.chip
        if stored.scale_dtype == E4M3.name and self._gpu is None:
            stored = replace(stored, scale_dtype="float32")  # the two scales of an element as one
        if (on_cpu := self._on_cpu(stored, group)) is not None:
            return on_cpu
        if stored.is_nested:
            from jaxvllm.models.forms.nested_groups import NestedGroups

            return NestedGroups.of(stored, group, self.shards) if self.by_tile else None
        if (stored.code.is_of_gguf or stored.code.is_by_table) and not self.by_tile:  # no kernel knows their tables
            return None
        if stored.is_by_row and stored.rounds_tokens and not of_experts:
            from jaxvllm.models.forms.rounded_tokens import RoundedTokens, multiplies

            if multiplies(stored.code, chip):
                return RoundedTokens(code=stored.code)
        if self._gpu is not None and (form := self._on_gpu(self._gpu, stored, group, of_experts)) is not None:
            return form
        # XLA would multiply by rows of int8 and FP8 without a copy, too, but in 1.2 times (v6e) to 2.4 times (v5p) the
        # time of our kernel with 16 rows, and in 1.05 to 1.3 times with 512 (libtpu's estimates).
        from jaxvllm.models.forms.scaled_groups import ScaledGroups
        from jaxvllm.models.forms.scaled_rows import ScaledRows, int8_form

        groups = ScaledGroups(stored.code, group, stored.scale_dtype, stored.has_zeros, self.shards)
        if isinstance(chip, TpuChip):
            from jaxvllm.models.forms.tpu_groups import TpuGroups, takes_groups

            if takes_groups(group):
                return TpuGroups(groups, chip, self.backend.interpret)
        if stored.is_by_row and stored.code == INT8:
            return int8_form(chip if isinstance(chip, CpuChip) else None)
        if self.by_tile:
            return groups
        return ScaledRows(code=stored.code) if stored.is_by_row else None

    def _on_gpu(self, gpu: GpuChip, stored: StoredAs, group: int | None, of_experts: bool) -> FewBits | None:
        """Returns the form of our kernel for GPUs, or None where the kernel does not take such groups."""
        from jaxvllm.models.forms.gpu_groups import GpuGroups, takes_group, takes_tokens

        if group is not None and not takes_group(stored.code, group, stored.scale_dtype):
            return None
        # Before Hopper, codes are multiplied by tokens as they are.
        may_round = not of_experts and gpu.has_copy_engine and takes_tokens(stored.code, group)
        return GpuGroups(
            stored.code,
            group,
            stored.scale_dtype,
            stored.has_zeros,
            self.shards,
            rounds_tokens=stored.rounds_tokens and may_round,
            has_input_scale=stored.has_input_scale and may_round,
            chip=gpu,
            interpret=self.backend.interpret,
        )

    def in_parts(self, axis: int, parts: Sequence[tuple[int, FewBits]]) -> FewBits | None:
        """Returns the form of a matrix that is cut along an axis into parts of these sizes and forms, if it has one.

        XLA would copy such a matrix from stacks of layers, which CPUs have not.
        """
        from jaxvllm.models.forms.in_parts import InParts

        return InParts(axis, tuple(parts)) if self.by_tile else None

    def in_order(self, stored: StoredAs, group: int | None) -> FewBits | None:
        """Returns the form of a matrix whose inputs have an order of their own, if it has one.

        In stacks of layers, which CPUs have not, gate and up would need an order each.
        """
        from jaxvllm.models.forms.sorted_inputs import SortedInputs

        form = self.of(stored, group) if self.by_tile else None
        return None if form is None else SortedInputs(form)

    def _on_cpu(self, stored: StoredAs, group: int | None) -> "CpuGroups | None":
        """Returns the form of one of our kernels, if one runs and knows the code, and a device has whole matrices."""
        chip = self.backend.chip
        if not isinstance(chip, CpuChip) or self.shards > 1:
            return None
        from jaxvllm.models.forms.cpu_decoded import CpuDecoded
        from jaxvllm.models.forms.cpu_groups import CpuGroups

        forms = (form for form in (CpuGroups, CpuDecoded) if form.takes_stored(stored, group))
        return next((form(stored, group, chip) for form in forms), None)

    def named(self, quantization: str, of_experts: bool = False) -> FewBits:
        """Returns the form that users call so. Raises NotImplementedError where there is none."""
        wanted = QUANTIZATIONS[quantization]
        # Tokens in FP8 are what XLA multiplies by FP8. Our kernel for CPUs rounds tokens to integers only.
        rounds_to_float8 = wanted.rounds_tokens and wanted.code == E4M3
        if not rounds_to_float8 and (on_cpu := self._on_cpu(wanted, wanted.group)) is not None:
            return on_cpu
        has_kernel = (isinstance(self.backend.chip, TpuChip) or self._gpu is not None) and of_experts
        has_kernel |= self._gpu is not None and wanted.code == E4M3
        if wanted.rounds_tokens and not has_kernel:
            from jaxvllm.models.forms.rounded_tokens import RoundedTokens

            return RoundedTokens(code=wanted.code)
        if (form := self.of(wanted, wanted.group, of_experts)) is None:
            raise NotImplementedError(
                f"quantization {quantization} has no kernel for this device yet, and without one each step would write "
                "all matrices in 16 bits: use int8 or fp8, or a CPU"
            )
        return form


@dataclass(frozen=True, kw_only=True)
class Forms:
    """The forms of a model's matrices.

    layers: of the matrices of all layers
    outside: of other matrices outside of the layers
    head: of an LM head of its own
    table: of an embedding that is the LM head too
    experts: of the experts of all layers
    adapters: of the two matrices of each adapter (LoRA), which are never rounded
    expert_adapters: of those of each expert
    stored: chooses the forms of matrices that a checkpoint stores in few bits, or None: all are decoded
    pads_tables: whether rows of embeddings and of the LM head are filled up to whole tiles, as TPUs need them
    own: the forms of some matrices, by their names and layers, which come before all others. None stands for outside
        the layers. Matrices in a stack have the form of the first
    """

    layers: Form = PLAIN
    outside: Form = PLAIN
    head: Form = PLAIN
    table: Form = PLAIN
    experts: Form = PLAIN
    adapters: Form = PLAIN
    expert_adapters: Form = PLAIN
    stored: FewBitsForms | None = None
    pads_tables: bool = False
    own: Mapping[MatrixKey, Form] = field(default_factory=dict)

    @classmethod
    def chosen(
        cls,
        quantization: str | None,
        backend: Backend,
        may_turn: bool,
        by_tile: bool = False,
        shards: int = 1,
        dtype: DTypeLike = "float32",
    ) -> Self:
        """Returns the forms for the kernels of `backend`. For the reference XLA multiplies.

        `may_turn` says that the model, of `dtype`, is on one CPU, whose layers have arrays of their own, and `by_tile`
        that it is on `shards` CPUs. A quantization is that of the layers. The head keeps its dtype, as in vLLM, or has
        eight bits where our integer kernel runs. Without one, matrices are kept as a checkpoint stores them, where
        there are forms for that.
        """
        chip = backend.chip if isinstance(backend.chip, CpuChip) else None
        usual: Form = PLAIN
        if chip is not None:
            usual = Packed(chip, jnp.dtype(dtype).name) if may_turn else PackedInSteps(chip)
        elif may_turn:
            from jaxvllm.models.forms.turned import Turned, prefers_turned

            usual = Turned() if prefers_turned() else PLAIN
        in_few_bits = FewBitsForms(backend, by_tile, shards)
        layers = usual if quantization is None else in_few_bits.named(quantization)
        # An expert is multiplied by few rows, and one that is turned ten times slower (CPU, 32 experts of 512 x 256).
        experts = PLAIN if chip is None else layers
        if quantization is not None:
            experts = in_few_bits.named(quantization, of_experts=True)
        # Adapters come and go, so that they are not put into another order.
        as_stored: Form = PLAIN if chip is None else CpuKernel(chip)
        streamed = as_stored
        if isinstance(backend.chip, TpuChip):
            from jaxvllm.models.forms.tpu_experts import TpuExperts

            streamed = TpuExperts(backend.chip, backend.interpret)
        elif isinstance(backend.chip, GpuChip):
            from jaxvllm.models.forms.gpu_experts import GpuExperts

            streamed = GpuExperts(backend.chip, backend.interpret)
        if quantization is None and streamed is not as_stored:
            experts = streamed
        stored = in_few_bits if quantization is None else None
        head, table = usual, PLAIN if chip is None else usual
        if chip is not None and may_turn and quantization in _ROUNDS_HEAD:
            from jaxvllm.models.forms.cpu_groups import CodeTable, CpuGroups

            head = CpuGroups(_HEAD, _HEAD.group, chip)
            table = CodeTable(head, jnp.dtype(dtype).name)
        return cls(
            layers=layers,
            outside=usual,
            head=head,
            table=table,
            experts=experts,
            adapters=as_stored,
            expert_adapters=streamed,
            stored=stored,
            pads_tables=isinstance(backend.chip, TpuChip),
        )

    def of(self, name: str, decl: ParamDecl, layer: int | None) -> Form:
        """Returns the form of the array with that name and declaration, of a layer or, with None, outside of them."""
        return self._usual(name, decl, layer).of_matrix(decl)

    def _usual(self, name: str, decl: ParamDecl, layer: int | None) -> Form:
        if (own := self.own.get((name, layer))) is not None:
            return own
        is_of_layer = layer is not None
        is_table = decl.storage in ("table", "tied_table", "matrix") and decl.dtype is None and not is_of_layer
        if is_table and (padded := self._padded(decl)) is not None:
            return padded
        if decl.storage == "tied_table":
            takes = not isinstance(self.table, FewBits) or self.table.takes(decl)
            return _if_smaller(self.table.of_matrix(decl), decl) if takes else PLAIN
        if decl.storage == "experts":
            return self.experts
        if decl.storage == "matrix":
            # An array that declares a dtype, such as a router, is never quantized.
            if is_of_layer and decl.dtype is None:
                return _if_smaller(self.layers.of_matrix(decl), decl)
            return _if_smaller(self.head.of_matrix(decl), decl) if name == "lm_head" else self.outside
        return PLAIN

    def of_saved_table(self, decl: ParamDecl) -> Form:
        """Returns the form of a table that an adapter brings along. It has one array, and is never rounded."""
        return self._padded(decl) or self.adapters

    def _padded(self, decl: ParamDecl) -> Form | None:
        """Returns the form of a table whose rows are to be filled up, and None for any other."""
        if not self.pads_tables:
            return None
        from jaxvllm.models.forms.padded_table import LANES, PaddedTable

        return PaddedTable(decl.shape[-1]) if decl.shape[-1] % LANES else None

    def kept(
        self,
        array: jax.Array,
        name: str,
        decl: ParamDecl,
        layer: int | None,
        sharding_of: Callable[[ParamDecl], NamedSharding],
    ) -> Any:
        """Returns the node of the tree that keeps `array`, which is on its devices already."""
        form = self.of(name, decl, layer)
        shardings = {name: sharding_of(part) for name, part in form.declare(decl).items()}
        return form.wrapped(form.keep(array, shardings))

    def node(self, name: str, decl: ParamDecl, layer: int | None, array: Callable[[ParamDecl], Any]) -> Any:
        """Returns the node of the tree that keeps an array, with `array(declaration)` in the place of each array."""
        form = self.of(name, decl, layer)
        return form.wrapped({name: array(part) for name, part in form.declare(decl).items()})


PLAIN_FORMS = Forms()


def _if_smaller(form: Form, decl: ParamDecl) -> Form:
    """Returns the form, or the plain one where its padding would take more than few bits save, in 16 bits."""
    return PLAIN if isinstance(form, FewBits) and not form.saves(decl, "bfloat16") else form
