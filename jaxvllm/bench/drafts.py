"""`DraftTotals`: how many draft tokens an engine has verified, and how many of them were right."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

# What a server tells Prometheus, under whatever prefix: the rest of the name, the labels and the value.
_SAMPLE = re.compile(r"^\w+:spec_decode_num_(\w+)_total(?:\{(.*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'\bposition="(\d+)"')


@dataclass(frozen=True)
class DraftTotals:
    """Counts of drafts. Without speculation all are zero, and there are no positions."""

    drafts: int  # times that draft tokens were verified for a row
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: tuple[int, ...]  # by their position among the drafts of a row

    @classmethod
    def read(cls, metrics: str) -> Self:
        """Reads the counters of vLLM's names from a server's answer to Prometheus, summed over its engines."""
        counts: Counter[str] = Counter()
        per_pos: Counter[int] = Counter()
        for name, labels, value in _SAMPLE.findall(metrics):
            if name == "accepted_tokens_per_pos" and (position := _POSITION.search(labels)):
                per_pos[int(position[1])] += int(float(value))
            else:
                counts[name] += int(float(value))
        positions = tuple(per_pos[position] for position in range(max(per_pos, default=-1) + 1))
        return cls(counts["drafts"], counts["draft_tokens"], counts["accepted_tokens"], positions)

    def since(self, earlier: "DraftTotals") -> "DraftTotals":
        """Returns what was counted after `earlier`."""
        before = (*earlier.accepted_per_pos, *[0] * len(self.accepted_per_pos))
        return DraftTotals(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_pos, before, strict=False)),
        )

    @property
    def acceptance_rate(self) -> float:
        """Percent of the draft tokens."""
        return 100 * self.accepted_tokens / self.draft_tokens

    @property
    def acceptance_length(self) -> float:
        """Tokens that a row yields in a step with drafts: those accepted, and one more."""
        return 1 + self.accepted_tokens / self.drafts

    @property
    def rates_per_pos(self) -> list[float]:
        """The share of all drafts whose token at each position was accepted."""
        return [count / self.drafts for count in self.accepted_per_pos]

    def line(self) -> str:
        """Returns one line for a person. There must have been drafts."""
        rates = ", ".join(f"{rate:.1%}" for rate in self.rates_per_pos)
        return (
            f"Drafts: {self.acceptance_rate:.1f}% of {self.draft_tokens:,} draft tokens accepted, acceptance length "
            f"{self.acceptance_length:.2f}, {self.drafts:,} drafts, by position {rates}"
        )

    def record(self) -> dict[str, Any]:
        """Returns the figures under vLLM's keys. There must have been drafts."""
        return {
            "spec_decode_acceptance_rate": self.acceptance_rate,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": self.rates_per_pos,
        }
