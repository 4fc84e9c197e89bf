"""Records what each step of a replica does for the requests that want an explanation, from its real plans and outputs.

Where no running request wants one, a step costs a loop over its admissions and nothing else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.explanation import (
    Admitted,
    Decode,
    ExplainedStep,
    KVWrite,
    Origin,
    StepKind,
    Trail,
    WholeStep,
)
from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.step_plan import Admission, Emitted, Ints, StepOutput, StepPlan, StepUpdate
from jaxvllm.runtime.buckets import Bucket


@dataclass
class _Row:
    """A row of a step whose request wants to know what happened. The last fields are known when the step is read."""

    row: int
    slot: int
    request: Request
    trail: Trail
    kind: StepKind
    start: int
    query_length: int
    first_column: int
    new_pages: tuple[int, ...]
    admitted: Admitted | None
    writes: tuple[KVWrite, ...] = ()
    num_allowed: int | None = None
    is_dropped: bool = False
    num_forced: int = 0
    page_table: Ints | None = None  # of a decoding row, and of one with forced tokens


class StepNotes:
    """The notes about one step under way. It is complete when the step's output has been brought in."""

    def __init__(self, plan: StepPlan, number: int, replica: int, rows: Sequence[_Row]):
        self._plan = plan
        self._number = number
        self._replica = replica
        self._rows = rows

    def masked(self, masks: Iterable[tuple[int, NDArray[np.int32]]]) -> None:
        """Notes how many tokens the mask of each slot allows."""
        counts = dict(masks)
        for row in self._rows:
            if (words := counts.get(row.slot)) is not None:
                row.num_allowed = int(np.bitwise_count(words.view(np.uint32)).sum())

    def arrived(self, scheduler: Scheduler) -> None:
        """Notes how far the rows had got. It is called when the output is here and `Scheduler.update` is not."""
        slots, group = scheduler.slots, scheduler.cache.groups[0]
        for row in self._rows:
            row.is_dropped = bool(slots.epoch[row.slot] != self._plan.epochs[row.row])
            if row.is_dropped:
                continue
            row.num_forced = int(slots.num_unreported[row.slot])
            if row.kind == "decode":  # only now the host knows where it was
                row.start = int(slots.num_known[row.slot]) - 1
            if row.kind != "prefill":
                row.page_table = group.table[row.slot].copy()

    def updated(
        self, output: StepOutput, update: StepUpdate, bucket: Bucket, device_seconds: float, host_seconds: float
    ) -> None:
        """Adds the step to the trails of its requests."""
        plan = self._plan
        batch = WholeStep(
            replica=self._replica,
            number=self._number,
            num_rows=plan.num_rows,
            num_decode_rows=plan.num_decode,
            num_tokens=plan.num_tokens,
            bucket_tokens=bucket.num_tokens,
            bucket_rows=bucket.num_rows,
            device_seconds=device_seconds,
            host_seconds=host_seconds,
        )
        for row in self._rows:
            emitted = [] if row.is_dropped else [one for one in update.emitted if one.request is row.request]
            self._add(row, emitted, output, batch)

    def _add(self, row: _Row, emitted: Sequence[Emitted], output: StepOutput, batch: WholeStep) -> None:
        origins = _origins(emitted, row.num_forced, output)
        num_sampled = len(origins) - origins.count("forced")
        num_refused = num_drafted = num_accepted = 0
        decodes: tuple[Decode, ...] = ()
        if not row.is_dropped:
            if row.request.constraint is not None:
                num_refused = int(output.counts[row.row]) - num_sampled
            if output.drafts is not None:
                num_drafted = int(output.drafts.drafted[row.row].sum())
                num_accepted = int(output.drafts.accepted[row.row].sum())
            if row.kind == "decode":
                decodes = _decodes(row.start, origins)
                row.query_length = max(len(origins), 1)
                assert row.page_table is not None
                row.writes = _writes(row.page_table, row.start, row.query_length, row.trail.page_size)
            if row.kind == "forced" and row.start > row.trail.num_computed:
                assert row.page_table is not None
                missing = row.start - row.trail.num_computed
                row.trail.keep_dropped(_writes(row.page_table, row.trail.num_computed, missing, row.trail.page_size))
        step = ExplainedStep(
            kind=row.kind,
            batch=batch,
            slot=row.slot,
            start=row.start,
            query_length=row.query_length,
            kv_length=row.start + row.query_length,
            first_column=row.first_column,
            new_pages=row.new_pages,
            writes=row.writes,
            first_output=row.trail.num_tokens,
            num_tokens=len(origins),
            admitted=row.admitted,
            decodes=decodes,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            num_allowed=row.num_allowed,
            num_refused=max(num_refused, 0),
            is_dropped=row.is_dropped,
        )
        row.trail.add(step, origins)


class StepRecorder:
    """Follows the requests of a replica that want an explanation from slot to slot."""

    def __init__(self, replica: int):
        self._replica = replica
        self._number = -1
        self._tenants: dict[int, Request] = {}  # those that want it, by slot

    def begin(self, plan: StepPlan, scheduler: Scheduler) -> StepNotes | None:
        """Notes what `plan`, the scheduler's latest, does for them. None: it does nothing for any of them."""
        self._number += 1
        for admission in plan.admissions:
            if admission.request.trail is not None:
                self._tenants[admission.slot] = admission.request
        if not self._tenants:
            return None
        tenants = scheduler.slots.tenants
        self._tenants = {slot: request for slot, request in self._tenants.items() if tenants[slot] is request}
        admissions = {admission.slot: admission for admission in plan.admissions}
        rows = [
            self._row(plan, scheduler, row, slot, admissions.get(slot))
            for row, slot in enumerate(plan.slots.tolist())
            if slot in self._tenants
        ]
        return StepNotes(plan, self._number, self._replica, rows) if rows else None

    def _row(self, plan: StepPlan, scheduler: Scheduler, row: int, slot: int, admission: Admission | None) -> _Row:
        request, slots = self._tenants[slot], scheduler.slots
        trail = request.trail
        assert trail is not None, "only requests with a trail are followed"
        start, length = int(plan.starts[row]), int(plan.lengths[row])
        kind: StepKind = "decode"
        if row >= plan.num_decode:
            kind = "prefill" if start < slots.prefill_len[slot] else "forced"
        opened = plan.new_pages[0]
        at = np.flatnonzero(opened.slots == slot)
        first_column, new_pages = int(opened.columns[at].min(initial=np.iinfo(np.int32).max)), opened.pages[at].tolist()
        admitted = None
        if admission is not None:
            pages = admission.pages[0].tolist()
            admitted = Admitted(slot, tuple(pages), admission.num_cached, request.num_preemptions)
            first_column = admission.num_cached // trail.page_size
            new_pages = pages[first_column:]
        writes: tuple[KVWrite, ...] = ()
        if kind != "decode":
            writes = _writes(scheduler.cache.groups[0].table[slot], start, length, trail.page_size)
        return _Row(
            row=row,
            slot=slot,
            request=request,
            trail=trail,
            kind=kind,
            start=start,
            query_length=length,
            first_column=first_column if new_pages else 0,
            new_pages=tuple(new_pages),
            admitted=admitted,
            writes=writes,
        )


def _origins(emitted: Sequence[Emitted], num_forced: int, output: StepOutput) -> list[Origin]:
    """Returns where the new tokens of a row came from. Forced ones are the first."""
    drafts = output.were_drafts
    return [
        "forced" if index < num_forced else "draft" if drafts is not None and drafts.flat[one.at] else "sampled"
        for index, one in enumerate(emitted)
    ]


def _decodes(start: int, origins: Sequence[Origin]) -> tuple[Decode, ...]:
    """Divides the tokens of a decoding row among decode steps: each ends with the token that was sampled."""
    found: list[Decode] = []
    position, num_accepted = start, 0
    for index, origin in enumerate(origins):
        num_accepted += origin == "draft"
        if origin == "sampled" or index == len(origins) - 1:
            count = num_accepted + (origin == "sampled")
            found.append(Decode(position, position + 1, count, num_accepted))
            position, num_accepted = position + count, 0
    return tuple(found) or (Decode(start, start + 1, 0, 0),)


def _writes(page_table: Ints, start: int, count: int, page_size: int) -> tuple[KVWrite, ...]:
    """Returns where the keys and values of `count` positions go, neighbouring places as one."""
    positions = np.arange(start, start + count)
    places = page_table[positions // page_size].astype(np.int64) * page_size + positions % page_size
    bounds = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), count]
    return tuple(
        KVWrite(start + first, end - first, int(places[first]))
        for first, end in zip(bounds[:-1], bounds[1:], strict=True)
    )
