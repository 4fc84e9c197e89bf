"""The plan: the planner's whole answer, as one value."""

from dataclasses import dataclass, replace

from jaxvllm.planner.compiler import Findings, Refusal, compile_in_child
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.device_memory import Memory
from jaxvllm.planner.roofline import Floor, decode_floors, prefill_floor
from jaxvllm.planner.target import CPU
from pallas_kernels.deviceless import MAX_DEVICES
from sharding.mesh import MeshShape

# Replicas of these sizes are tried when a model does not fit.
_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Question:
    """A model, its deployment and its load. Raises ValueError for more devices in a program than can be planned."""

    model: str
    deployment: Deployment
    utilization: float  # share of a device's memory that may be taken
    request_tokens: int  # of the requests whose number is asked for
    context: int  # tokens that each decoding request attends to

    def __post_init__(self) -> None:
        mesh, together = self.deployment.mesh, self.deployment.compiled_mesh.num_devices
        if self.deployment.target.chip and together > max(MAX_DEVICES, mesh.replica_devices):
            raise ValueError(
                f"mesh {mesh} has {together} devices that share experts, more than the {MAX_DEVICES} that can be "
                "planned: plan fewer replicas"
            )
        if self.deployment.target.chip and mesh.replica_devices > MAX_DEVICES:
            raise ValueError(
                f"mesh {mesh} has {mesh.replica_devices} devices to a replica, more than the {MAX_DEVICES} that "
                f"can be planned: plan 1x{MAX_DEVICES}, or Dx{MAX_DEVICES} for D replicas"
            )


@dataclass(frozen=True)
class CapacityPlan:
    """The answer. It has no `findings` when the weights alone are too large, or the compiler found no room."""

    model: str
    mesh: MeshShape
    device: str
    dtype: str
    attention: str  # the kernels that run: tpu, gpu or reference
    num_parameters: int
    stored_bytes: int | None  # of the GGUF files that the weights are in; None: the config alone is known
    fits: bool  # with room for at least one request
    memory: Memory
    findings: Findings | None
    no_room: str  # the compiler's message when it found no room for a step
    kv_copies: int  # devices, or heads of a device, that hold the same KV head
    zero_heads: int  # query heads of zeros, which make the heads divide
    stage_layers: tuple[int, ...]  # how many layers each stage has
    empty_weights: float  # bytes of a device's weights, on average, for layers that only other stages have
    empty_kv: float  # bytes of its pages for such layers
    zero_tokens: int  # rows that are never sampled, which make the vocabulary divide
    context: int
    decode: tuple[Floor, ...]  # empty where rates are not known
    prefill: Floor | None
    advice: str  # which mesh would hold the model, when this one does not


def make_plan(question: Question) -> CapacityPlan | Refusal:
    """Compiles the steps and makes the plan, even if the model does not fit. A refusal says why there is none."""
    deployment = question.deployment
    memory = _memory(question, deployment, 0)
    findings, no_room = None, ""
    if memory.fits:
        outcome = compile_in_child(deployment)
        if isinstance(outcome, Findings):
            findings = outcome
            memory = _memory(question, deployment, findings.largest.step_bytes)
        elif outcome.kind == "memory":
            no_room = outcome.message
        else:
            return outcome
    fits = memory.fits and findings is not None
    decode: tuple[Floor, ...] = ()
    prefill = None
    if fits and findings and deployment.target.chip:
        decode = decode_floors(deployment, deployment.target.chip, findings, question.context, memory.num_tokens)
        prefill = prefill_floor(deployment, deployment.target.chip, findings)
    whole = deployment.spread.whole
    return CapacityPlan(
        model=question.model,
        mesh=deployment.mesh,
        device=deployment.device,
        dtype=deployment.dtype,
        attention=deployment.attention.kind,
        num_parameters=deployment.num_parameters,
        stored_bytes=deployment.stored_bytes,
        fits=fits,
        memory=memory,
        findings=findings,
        no_room=no_room,
        kv_copies=deployment.spread.kv_copies,
        zero_heads=deployment.spread.zero_heads,
        stage_layers=tuple(map(len, deployment.spread.stage_layers)),
        empty_weights=deployment.share.empty_bytes,
        empty_kv=deployment.empty_share(memory.num_tokens) * memory.kv,
        zero_tokens=whole.vocab_size - deployment.spec.vocab_size,
        context=question.context,
        decode=decode,
        prefill=prefill,
        advice=""
        if fits
        else _advice(question, memory.step) + (", or lower max_num_batched_tokens" if no_room else ""),
    )


def _memory(question: Question, deployment: Deployment, step_bytes: int) -> Memory:
    return Memory.of(deployment, step_bytes, question.utilization, question.request_tokens)


def _advice(question: Question, step_bytes: int) -> str:
    """Names the smallest mesh of the same devices with room for a request, as far as is known without compiling."""
    deployment = question.deployment
    if deployment.device == CPU:
        return "virtual devices share the memory of this machine: choose a smaller model, or fewer replicas"
    for size in (size for size in _SIZES if size > deployment.size):
        try:
            larger = replace(deployment, size=size)
        except ValueError:  # this model cannot be spread so
            continue
        if _memory(question, larger, step_bytes).fits:
            mesh = larger.compiled_mesh
            step = "with this step's temporaries" if step_bytes else "before a step's temporaries"
            more = (
                "plan that mesh to be sure"
                if mesh.num_devices <= MAX_DEVICES
                else f"more than the {MAX_DEVICES} that can be planned"
            )
            return f"about {mesh} of {deployment.device} would hold it ({step}): {more}"
    most = deployment.stages * _SIZES[-1]
    return f"no replica of up to {most} {deployment.device} would hold it: choose a larger device or a smaller model"
