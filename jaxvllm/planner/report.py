"""Writes a plan as text."""

from collections.abc import Iterator

from jaxvllm.planner.capacity_plan import CapacityPlan
from jaxvllm.planner.compiler import StepFindings
from jaxvllm.planner.hlo import ALL_DEVICES
from jaxvllm.planner.roofline import Floor
from sharding.rules import DATA

GIB, MIB = 2**30, 2**20


def report(plan: CapacityPlan) -> str:
    """Returns the whole report, with a section for each question."""
    sections = [_title(plan), _memory(plan)]
    if plan.findings is not None:
        sections += [_collectives(plan), _floors(plan), _compilation(plan)]
    return "\n\n".join("\n".join(lines) for lines in (list(section) for section in sections) if lines)


def _title(plan: CapacityPlan) -> Iterator[str]:
    count = f"{plan.num_parameters / 1e9:.2f} billion" if plan.num_parameters >= 1e9 else f"{plan.num_parameters:,}"
    yield f"{plan.model} on {plan.mesh} {plan.device}: {'fits' if plan.fits else 'does not fit'}"
    yield f"  {count} parameters, {plan.dtype}, attention by {plan.attention}"
    if plan.stored_bytes is not None:
        decoded = f"what this device has no form for counts in {plan.dtype}"
        yield f"  {plan.stored_bytes / GIB:.2f} GiB in its files, whose matrices count as they are stored; {decoded}"
    if plan.kv_copies > 1:
        yield f"  KV heads do not divide: there are {plan.kv_copies} copies of each, and of its pages"
    if plan.zero_heads:
        yield f"  query heads do not divide: {plan.zero_heads} of zeros beside them cost what others do"
    if plan.empty_weights or plan.empty_kv:
        layers = ", ".join(map(str, plan.stage_layers))
        empty = f"{plan.empty_weights / GIB:.2f} GiB of the weights' memory and {plan.empty_kv / GIB:.2f} of KV's"
        yield f"  stages differ: they have {layers} layers, and {empty} are for layers that only other stages have"
    if plan.zero_tokens:
        yield f"  the vocabulary does not divide: {plan.zero_tokens} rows beside it are never sampled"


def _memory(plan: CapacityPlan) -> Iterator[str]:
    memory = plan.memory
    yield "memory of each device, GiB"
    yield f"  {'weights':<12}{memory.weights / GIB:8.2f}"
    yield f"  {'slots':<12}{memory.state / GIB:8.2f}   tokens, page tables and parameters of running requests"
    if plan.findings is not None:
        largest = plan.findings.largest
        temporaries = f"{largest.num_tokens} tokens x {largest.num_rows} rows: temporaries and outputs"
        yield f"  {'step':<12}{memory.step / GIB:8.2f}   {temporaries}"
    if plan.no_room:
        yield f"  of {memory.total / GIB:.2f}, and the compiler finds no room for a step: {plan.no_room}"
        return
    requests = f"{memory.num_requests:,} requests of {memory.request_tokens:,}"
    if plan.findings is not None and memory.num_requests > plan.findings.decode.num_rows:
        requests += f", {plan.findings.decode.num_rows:,} at once"
    yield f"  {'KV':<12}{memory.kv / GIB:8.2f}   {memory.num_tokens:,} tokens, {requests}"
    yield f"  {'unused' if memory.unused >= 0 else 'missing':<12}{abs(memory.unused) / GIB:8.2f}"
    yield f"  {'in all':<12}{memory.total / GIB:8.2f}"


def _collectives(plan: CapacityPlan) -> Iterator[str]:
    findings = plan.findings
    assert findings is not None
    if not (findings.decode.collectives or findings.largest.collectives):
        return
    yield "collectives on each device, by the compiled program"
    for name, step in (("decode", findings.decode), ("prefill", findings.largest)):
        yield f"  {name} step of {step.num_tokens} tokens"
        yield from _collectives_of(step)


def _collectives_of(step: StepFindings) -> Iterator[str]:
    for each in step.collectives:
        when = {DATA: "   over replicas", ALL_DEVICES: "   at most, over all devices"}.get(each.over, "")
        when += "   if a row samples or wants logprobs" if each.conditional else ""
        total = each.count * each.num_bytes
        yield f"    {each.count:4} {each.kind:<19}{_size(each.num_bytes):>12} each {_size(total):>12} in all{when}"


def _floors(plan: CapacityPlan) -> Iterator[str]:
    if plan.prefill is None:
        yield "no roofline: the rates of this device are not known"
        return
    replicas = plan.mesh.data
    yield "roofline: a floor by published rates, not a forecast (no launches, latency or imperfect overlap)"
    yield f"  {'step':<36}{'memory':>9}{'compute':>9}{'links':>9}{'floor, ms':>11}{'tokens/s':>12}" + (
        f"{f'of {replicas} replicas':>16}" if replicas > 1 else ""
    )
    for floor in plan.decode:
        yield _floor(f"decode, {floor.num_tokens} x {plan.context} tokens of context", floor, replicas)
    yield _floor(f"prefill, {plan.prefill.num_tokens} tokens of one prompt", plan.prefill, replicas)
    if plan.mesh.model > 1 and not plan.prefill.links:
        yield "  no links: a replica is one chip, and how fast its devices reach each other is not published"
    if plan.mesh.stages > 1:
        yield "  links are those within a stage: what stages pass on is above, and how fast is not known between hosts"


def _floor(name: str, floor: Floor, replicas: int) -> str:
    times = "".join(f"{seconds * 1e3:9.3f}" for seconds in (floor.memory, floor.compute, floor.links))
    rate = floor.tokens_per_second
    total = f"{rate * replicas:16,.0f}" if replicas > 1 else ""
    return f"  {name:<36}{times}{floor.seconds * 1e3:11.3f}{rate:12,.0f}{total}"


def _compilation(plan: CapacityPlan) -> Iterator[str]:
    findings = plan.findings
    assert findings is not None
    versions = ", ".join(f"{package} {version}" for package, version in findings.versions.items())
    seconds = f"{findings.largest.seconds:.1f} and {findings.decode.seconds:.1f} s"
    yield f"compiled in {seconds} here ({versions})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 2**10:,.1f} KiB"
