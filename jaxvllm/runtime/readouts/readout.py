"""A readout on the devices has programs over what a forward pass has left, and brings their results to the host."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax

from jaxvllm.core.step_plan import Ints, StepPlan
from jaxvllm.models.params import Params
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.sampler import SamplerOptions
from jaxvllm.runtime.slot_fields import DeviceState


@partial(jax.tree_util.register_dataclass, data_fields=["hidden", "slots", "positions"], meta_fields=[])
@dataclass(frozen=True)
class Unsampled:
    """The values that `forward` leaves for `sample_rows`, R rows."""

    hidden: jax.Array  # f[R, E], of each row's last token, with all that the LM head reads
    slots: jax.Array  # i32[R]; the trash slot where a row yields nothing
    positions: jax.Array  # i32[R], of the token to sample


@partial(jax.tree_util.register_dataclass, data_fields=["hidden", "choices"], meta_fields=[])
@dataclass(frozen=True)
class Readable:
    """The values that `forward` leaves of its T tokens, for readouts."""

    hidden: jax.Array  # f[T, ..], which the LM head reads; those of tokens that nothing reads mean nothing
    choices: jax.Array | None  # [T, layers with experts, k]: the experts that each has chosen; None: nobody is told


@dataclass
class Forwarded:
    """The results of the first half of a step, and what was read from them before the second half."""

    unsampled: Unsampled
    readable: Readable
    head: Params  # what `project_logits` reads of the weights that computed it
    reports: dict[str, list[Any]] = field(default_factory=dict)  # by the name of the readout, one of each call


# Reads something of what a forward pass has left, as int32 words from the host say.
type ReadProgram = Callable[[DeviceState, Forwarded, Any], Any]


class ProgramMaker(Protocol):
    """The part of `StepCompiler` that readouts need to compile their programs."""

    @property
    def params(self) -> Params: ...

    @property
    def state(self) -> DeviceState: ...

    @property
    def sampling(self) -> SamplerOptions: ...

    def of_replicas(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an array of which each replica has a part of this shape, which all of its devices have whole."""

    @property
    def hidden_size(self) -> int:
        """The size of a hidden state, with which what the LM head reads begins."""

    def hidden(self, count: int) -> Any:
        """Returns the shape of what the LM head reads of so many tokens."""

    def choices(self, count: int) -> Any:
        """Returns the shape of the experts that so many tokens have chosen."""

    def unsampled(self, num_rows: int) -> Unsampled:
        """Returns the shapes of what a forward pass leaves of so many rows."""

    def compile_recipe(
        self, run: Callable[..., Any], arguments: tuple[Any, ...], is_read: bool = False
    ) -> jax.stages.Compiled:
        """Compiles `run`, which needs no model. `is_read`: whether the host reads the result."""

    def compile_shared(
        self, key: tuple[str, int], run: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> jax.stages.Compiled:
        """Compiles `run`, which needs the model, once for all buckets with the same `key`: a name and a size.

        The host reads the result.
        """


class DeviceReadout(Protocol):
    """One kind of report, computed."""

    @property
    def name(self) -> str:
        """The name in `core/readout.py`."""

    def is_possible(self, options: SamplerOptions) -> bool:
        """Returns whether any request of an engine with these options may want it."""

    def is_expected(self, options: SamplerOptions) -> bool:
        """Returns whether its programs are compiled before a request wants it."""

    def sizes(self, bucket: Bucket) -> tuple[int, ...]:
        """Returns the sizes of a bucket on which its programs depend."""

    def compile(self, maker: ProgramMaker, bucket: Bucket) -> ReadProgram:
        """Compiles the program for the steps of `bucket`."""

    def calls(self, plan: StepPlan, bucket: Bucket) -> Iterable[Ints]:
        """Returns the words of each call of the program for a plan of which some rows want it. None is empty."""

    def report(self, plan: StepPlan, results: Sequence[Any]) -> Any:
        """Brings the results of these calls to the host, as `core/readout.py` says."""
