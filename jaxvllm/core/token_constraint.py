"""Constraints of the tokens of one request: what they decide, and the guard that keeps their failures to it."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.errors import belongs_to_work


class TokenConstraint(Protocol):
    """Decides on the host which tokens may come next in a request, as a grammar does.

    Where a token waits for `fill`, its step samples in a separate program. It is asked through a `GuardedConstraint`:
    an exception ends the request and no other.
    """

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, except EOS."""

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes tokens that follow, in order, up to the first that is not allowed. Returns how many it has taken."""

    def forced(self) -> Sequence[int]:
        """Returns the tokens that must come next whatever the model says, as many as are known, or none."""

    def fill(self, words: NDArray[np.int32]) -> None:
        """Writes the mask of allowed next tokens: bit i of `words`, counted from each word's lowest, is token i."""


class GuardedConstraint:
    """Asks a constraint, and keeps what it raises as `failure`, so that nothing of it reaches the loop of all requests.

    It is asked nothing after that. Then it forces no token, is not complete and takes none, so its row goes on to
    its next mask or its next token, where `ConstrainedRows` looks for a failure and ends the request.
    """

    def __init__(self, constraint: TokenConstraint):
        self._constraint = constraint
        self.failure: BaseException | None = None

    @classmethod
    def of(cls, constraint: TokenConstraint | None) -> Self | None:
        """Returns the guarded form of a constraint, or None where there is none."""
        return None if constraint is None else cls(constraint)

    @property
    def unguarded(self) -> TokenConstraint:
        """The constraint itself."""
        return self._constraint

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, except EOS."""
        return self._ask(lambda: self._constraint.is_complete, False)

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes tokens that follow, up to the first that is not allowed, and returns how many it has taken."""
        return self._ask(lambda: self._constraint.advance(token_ids), 0)

    def take_forced(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that it forced. A constraint that refuses one of them has failed."""
        if self.advance(token_ids) != len(token_ids) and self.failure is None:
            self.failure = RuntimeError("the form of the request refuses a token that it forced")

    def forced(self) -> Sequence[int]:
        """Returns the tokens that must come next, as far as they are known."""
        return self._ask(self._constraint.forced, ())

    def fill(self, words: NDArray[np.int32]) -> None:
        """Writes the mask of allowed next tokens, unless it fails."""
        self._ask(lambda: self._constraint.fill(words), None)

    def _ask[Answer](self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        if self.failure is None:
            try:
                return question()
            except BaseException as error:
                if not belongs_to_work(error):
                    raise
                self.failure = error
        return otherwise
