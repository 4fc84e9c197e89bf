"""Reads recorded loads: when requests arrived, how long they were, and what they shared.

Two public formats are read. A `.jsonl` file is one of Mooncake's traces, an object a line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

`timestamp` is in milliseconds, and each of the `hash_ids` names a block of 512 tokens of the prompt, the same in all
prompts that share it. `hash_ids` may be absent: then the prompt shares nothing.

A `.csv` file has a header, with the columns of BurstGPT (`Timestamp`, `Request tokens`, `Response tokens`, in seconds)
or of Azure's traces (`TIMESTAMP` as a date and time, `ContextTokens`, `GeneratedTokens`). Such prompts share nothing.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jaxvllm.bench.traffic import Traffic
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.value_checks import MAX_INT32, integer, number
from jaxvllm.simulator.arrival import Arrival, Segment

BLOCK = 512  # tokens that one of the `hash_ids` stands for
# Names of what requests do not share begin here: more than a trace has blocks.
_OWN = 2**30
# Seconds from the first arrival to the last: 30 years. Times are read to the microsecond, and twice that is exact.
_LONGEST = 10**9


@dataclass(frozen=True)
class TraceWorkload:
    """The requests of a file, in the order of their arrival. Raises ValueError for a file that is no trace.

    `rate` changes the time between arrivals so that as many requests arrive in a second, and None leaves it as it was.
    """

    path: Path
    count: int | None = None  # requests, from the first; None: all
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.path.suffix not in (".jsonl", ".csv"):
            raise ValueError(f"--trace {self.path} must be a .jsonl file (Mooncake) or a .csv file (BurstGPT, Azure)")
        if not self._recorded:
            raise ValueError(f"--trace {self.path} has no request with a prompt and an answer")

    @cached_property
    def _recorded(self) -> list[Arrival]:
        """The arrivals of the file, the first at second 0."""
        read = _mooncake if self.path.suffix == ".jsonl" else _table
        with self.path.open(encoding="utf-8") as file:
            try:
                found = sorted(read(file), key=lambda arrival: arrival.at)[: self.count]
            except ParameterError as error:
                raise ValueError(f"--trace {self.path}: {error}: mend the file, or leave such requests out") from None
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"--trace {self.path} is in no format that is known: {error!r}") from None
        return [replace(one, at=one.at - found[0].at) for one in found]

    @property
    def traffic(self) -> Traffic:
        return Traffic(len(self._recorded), self._own_rate if self.rate is None else self.rate)

    @property
    def _own_rate(self) -> float:
        """Requests that arrived in a second."""
        last = self._recorded[-1].at
        return len(self._recorded) / last if last else math.inf

    def arrivals(self) -> Iterator[Arrival]:
        scale = 1.0 if self.rate is None or math.isinf(self._own_rate) else self._own_rate / self.rate
        return (replace(one, at=one.at * scale) for one in self._recorded)

    def at_rate(self, rate: float, count: int) -> Self:
        return replace(self, rate=rate, count=count)


def _mooncake(file: Iterator[str]) -> Iterator[Arrival]:
    for index, line in enumerate(file):
        if not line.strip():
            continue
        entry: Mapping[str, Any] = json.loads(line)
        where = f"line {index + 1}: "
        left = integer(f"{where}input_length", entry["input_length"], 0, MAX_INT32)
        num_answer = integer(f"{where}output_length", entry["output_length"], 0, MAX_INT32)
        at = number(f"{where}timestamp", entry["timestamp"], 0, 1000 * _LONGEST) / 1000
        prompt = []
        for name in entry.get("hash_ids", ()):
            prompt.append(Segment(integer(f"{where}each of hash_ids", name, 0, _OWN - 1), min(BLOCK, left)))
            left -= prompt[-1].num_tokens
            if not left:
                break
        if left:
            prompt.append(Segment(_OWN + 2 * index, left))
        yield from _arrival(at, tuple(prompt), num_answer, index)


def _table(file: Iterator[str]) -> Iterator[Arrival]:
    for index, row in enumerate(csv.DictReader(file)):
        where = f"request {index + 1}: "
        if "ContextTokens" in row:
            at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            names = ("ContextTokens", "GeneratedTokens")
        else:
            at = number(f"{where}Timestamp", float(row["Timestamp"]), 0, _LONGEST)
            names = ("Request tokens", "Response tokens")
        lengths = [integer(f"{where}{name}", int(row[name]), 0, MAX_INT32) for name in names]
        yield from _arrival(at, (Segment(_OWN + 2 * index, lengths[0]),), lengths[1], index)


def _arrival(at: float, prompt: tuple[Segment, ...], num_answer: int, index: int) -> Iterator[Arrival]:
    """Yields a request, unless it failed when it was recorded: such lines have no prompt or no answer."""
    if num_answer > 0 and any(segment.num_tokens for segment in prompt):
        yield Arrival(at, prompt, Segment(_OWN + 2 * index + 1, num_answer))
