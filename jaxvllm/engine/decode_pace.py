"""The pace of decode steps: how many a program takes, and how many drafts a row has in each, by what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jaxvllm.engine.burst_pace import BurstPace
from jaxvllm.engine.draft_pace import DraftPace
from jaxvllm.runtime.runner import Runner

# Steps have drafts where more than this share of their rows may have some.
LEAST_SEEN = 0.5


@dataclass(frozen=True)
class DecodeChoice:
    """The most that the next step may have, if it computes no prompt."""

    num_rows: int  # that decode: of the replica that has most of them, if several step together
    num_steps: int
    num_drafts: int  # of a row in each of these steps


@dataclass(frozen=True)
class DecodeTime:
    """The time of a program for decoding, and what its rows got for it."""

    num_rows: int
    num_steps: int  # that it took
    num_drafts: int  # that a row might have in each
    seconds: float  # of the program
    tokens: float  # of a row in a step, on average
    is_paced: bool  # whether it was known how many decode steps a burst has; without that there is one
    is_blind: bool  # whether the proposer did not see the steps

    @classmethod
    def joined(cls, times: "Sequence[DecodeTime]") -> "DecodeTime":
        """Returns the time of a program that several replicas ran together, each of which says what it has seen.

        It counts for the most rows that a replica had. Fewer rows are never measured then, so that it is paced if the
        replica with the most rows was.
        """
        most = max(times, key=lambda time: time.num_rows)
        return cls(
            most.num_rows,
            max(time.num_steps for time in times),
            most.num_drafts,
            min(time.seconds for time in times),  # the others include what the host did in between
            float(np.average([time.tokens for time in times], weights=[time.num_rows for time in times])),
            most.is_paced,
            most.is_blind,
        )


class DecodingRows(Protocol):
    """The rows of a replica that are to decode."""

    @property
    def num_decoding(self) -> int:
        """The number of rows that decode in the next step, if it computes no prompt."""

    @property
    def have_drafts(self) -> NDArray[np.bool_]:
        """Whether each of its rows may have drafts, because the proposer has seen every step of its request."""

    def repeat(self) -> bool:
        """Returns whether they repeat themselves, if it is time to look."""


class DecodePace:
    """Measures decode steps and decides what the next one has. Replicas that step together have one pace."""

    def __init__(self, runner: Runner, burst_seconds: float):
        """Begins without measurements. A program of several decode steps may take `burst_seconds`."""
        self._programs = runner.programs
        ladder = runner.programs.ladder
        self._burst_seconds = burst_seconds
        self._plain = BurstPace(burst_seconds)
        self._drafted: dict[int, BurstPace] = {}  # by the drafts of a row, with which steps take longer
        self._sees_plain = ladder.drafts.sees_decoding
        row_counts = [bucket.num_rows for bucket in ladder.buckets if bucket.is_decode]
        self._drafts = DraftPace(row_counts, runner.proposer_catches_up, self._sees_plain)

    def choose(self, replicas: Sequence[DecodingRows]) -> DecodeChoice:
        """Returns what the next step may have, which is one program for all `replicas`."""
        programs = self._programs
        num_rows = max(replica.num_decoding for replica in replicas)
        plain = DecodeChoice(num_rows, self._plain.width(num_rows, programs.burst_width), 0)
        drafted = programs.drafted(num_rows)
        if not drafted:
            if programs.may_compile_drafts and any(replica.repeat() for replica in replicas):
                programs.compile_drafts()
            return plain
        most = {k: min(bucket.num_tokens / max(num_rows, 1), 1 + k) for k, bucket in drafted.items()}
        num_drafts = self._drafts.choose(num_rows, most)
        if not num_drafts or not self._may_draft(replicas):
            return plain
        return DecodeChoice(num_rows, self._with(num_drafts).width(num_rows, drafted[num_drafts].width), num_drafts)

    def _may_draft(self, replicas: Sequence[DecodingRows]) -> bool:
        """Returns whether drafts are possible for so many rows that the others do not decide what they bring."""
        if not self._sees_plain:
            return True
        rows = np.concatenate([replica.have_drafts for replica in replicas])
        return not len(rows) or float(rows.mean()) > LEAST_SEEN

    def may_be_blind(self, num_rows: int) -> bool:
        """Returns whether what guesses need not see a step of so many rows: there are no drafts before they are fewer.

        The step has none itself.
        """
        return self._drafts.may_be_blind(num_rows)

    def is_known(self, num_rows: int, num_drafts: int) -> bool:
        """Returns whether steps of so many rows, with so many drafts each, were measured."""
        return self._with(num_drafts).is_known(num_rows)

    def measured(self, time: DecodeTime) -> None:
        """Takes in what a program took."""
        self._with(time.num_drafts).measured(time.num_rows, time.num_steps, time.seconds)
        if time.is_paced and (time.num_drafts or not self._sees_plain or time.is_blind):
            self._drafts.measured(time.num_rows, time.num_drafts, time.seconds / time.num_steps, time.tokens)

    def _with(self, num_drafts: int) -> BurstPace:
        """Returns the pace of steps in which a row may have so many drafts."""
        if not num_drafts:
            return self._plain
        return self._drafted.setdefault(num_drafts, BurstPace(self._burst_seconds))
