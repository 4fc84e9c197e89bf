"""The plan: everything that the planner has to say, as one value."""

from dataclasses import dataclass, replace

from jaxvllm.models.params import num_parameters
from jaxvllm.planner.compiler import compile_in_child
from jaxvllm.planner.findings import Findings, Refusal
from jaxvllm.planner.job import Job
from jaxvllm.planner.memory import Memory
from jaxvllm.planner.roofline import Floor, decode_floors, prefill_floor
from jaxvllm.planner.target import CPU
from pallas_kernels.deviceless import MAX_DEVICES
from sharding.mesh import MeshShape

# Replicas of these sizes are tried when a model does not fit.
_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Question:
    """What to plan, and for what load. ValueError: more devices to a replica than there are compilers for."""

    model: str
    job: Job
    utilization: float  # share of a device's memory that may be taken
    request_tokens: int  # of the requests whose number is asked for
    context: int  # tokens that each decoding request attends to

    def __post_init__(self) -> None:
        if self.job.target.chip and self.job.size > MAX_DEVICES:
            raise ValueError(
                f"mesh {self.mesh} has {self.job.size} devices to a replica, more than the {MAX_DEVICES} that can be "
                f"planned: plan 1x{MAX_DEVICES}, or Dx{MAX_DEVICES} for D replicas"
            )

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(self.job.replicas, self.job.size)


@dataclass(frozen=True)
class Plan:
    """The answer. There are no `findings` when the weights alone are too large, or the compiler found no room."""

    model: str
    mesh: MeshShape
    device: str
    dtype: str
    attention: str  # the kernels that run: tpu, gpu or reference
    num_parameters: int
    fits: bool  # with room for at least one request
    memory: Memory
    findings: Findings | None
    no_room: str  # what the compiler said when it found no room for a step
    kv_copies: int  # devices, or heads of a device, that hold the same KV head
    zero_heads: int  # query heads of zeros, that make heads divide
    zero_tokens: int  # rows of the vocabulary that are never sampled, likewise
    context: int
    decode: tuple[Floor, ...]  # empty where rates are not known
    prefill: Floor | None
    advice: str  # when it does not fit: which mesh would


def make_plan(question: Question) -> Plan | Refusal:
    """Compiles and works everything out. That a model does not fit is a plan too; a refusal says why there is none."""
    job = question.job
    memory = _memory(question, job, 0)
    findings, no_room = None, ""
    if memory.fits:
        outcome = compile_in_child(job)
        if isinstance(outcome, Findings):
            findings = outcome
            memory = _memory(question, job, findings.largest.step_bytes)
        elif outcome.kind == "memory":
            no_room = outcome.message
        else:
            return outcome
    fits = memory.fits and findings is not None
    decode: tuple[Floor, ...] = ()
    prefill = None
    if fits and findings and job.target.chip:
        decode = decode_floors(job, job.target.chip, findings, question.context, memory.num_tokens)
        prefill = prefill_floor(job, job.target.chip, findings)
    whole = job.spread.whole
    return Plan(
        model=question.model,
        mesh=question.mesh,
        device=job.device,
        dtype=job.dtype,
        attention=job.backend.kind,
        num_parameters=num_parameters(job.spec),
        fits=fits,
        memory=memory,
        findings=findings,
        no_room=no_room,
        kv_copies=job.spread.kv_copies,
        zero_heads=whole.num_heads - job.spec.num_heads,
        zero_tokens=whole.vocab_size - job.spec.vocab_size,
        context=question.context,
        decode=decode,
        prefill=prefill,
        advice=""
        if fits
        else _advice(question, memory.step) + (", or lower max_num_batched_tokens" if no_room else ""),
    )


def _memory(question: Question, job: Job, step_bytes: int) -> Memory:
    return Memory.of(job, step_bytes, question.utilization, question.request_tokens)


def _advice(question: Question, step_bytes: int) -> str:
    """The smallest mesh of the same devices that has room for a request, as far as can be told without compiling."""
    job = question.job
    if job.device == CPU:
        return "virtual devices share the memory of this machine: choose a smaller model, or fewer replicas"
    for size in (size for size in _SIZES if size > job.size):
        try:
            larger = replace(job, size=size)
        except ValueError:  # this model cannot be spread so
            continue
        if _memory(question, larger, step_bytes).fits:
            step = "with this step's temporaries" if step_bytes else "before a step's temporaries"
            more = (
                "plan that mesh to be sure"
                if size <= MAX_DEVICES
                else f"more than the {MAX_DEVICES} that can be planned"
            )
            return f"about 1x{size} of {job.device} would hold it ({step}): {more}"
    return f"no replica of up to {_SIZES[-1]} {job.device} would hold it: choose a larger device or a smaller model"
