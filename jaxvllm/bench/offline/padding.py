"""`Padding`: the part of an engine's work that was for nothing, between two moments."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from jaxvllm.engine.stats import EngineStats


@dataclass(frozen=True)
class Padding:
    """Tokens and rows that steps computed, and which of them nobody wanted."""

    tokens: int  # computed, padding included
    padding_tokens: int  # only filled up a bucket
    ended_tokens: int  # of rows that had ended, which the host had not learned yet
    rows: int  # computed, padding included: each costs an LM head
    padding_rows: int

    @classmethod
    def between(cls, before: EngineStats, after: EngineStats) -> Self:
        """Returns the work that `after` counts and `before` does not."""
        return cls(
            tokens=after.num_bucket_tokens - before.num_bucket_tokens,
            padding_tokens=after.num_padding_tokens - before.num_padding_tokens,
            ended_tokens=after.num_ended_tokens - before.num_ended_tokens,
            rows=after.num_bucket_rows - before.num_bucket_rows,
            padding_rows=after.num_padding_rows - before.num_padding_rows,
        )

    @property
    def share(self) -> float:
        """The share of the computed tokens that only filled up a bucket; 0 when nothing was computed."""
        return self.padding_tokens / self.tokens if self.tokens else 0.0

    @property
    def ended_share(self) -> float:
        return self.ended_tokens / self.tokens if self.tokens else 0.0

    def line(self) -> str:
        """Returns one line for a person."""
        ended = f", and {self.ended_share:.1%} were of rows that had ended" if self.ended_tokens else ""
        return f"Padding: {self.share:.1%} of {self.tokens:,} computed tokens{ended}"

    def record(self) -> dict[str, Any]:
        """Returns the figures for JSON."""
        return asdict(self) | {"share": self.share, "ended_share": self.ended_share}
