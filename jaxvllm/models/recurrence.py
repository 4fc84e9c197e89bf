"""`Recurrence`: how the state of one head takes in a token. A new kind of state is one, and a `StateMixer` that has it.

A token goes through a short convolution first (`CausalConv`), and then into what the recurrence keeps. `RecurrentRule`
is both together, for all heads: the rule of a `StateMemory`, whose states are snapshots and wait for drafts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.state_memory import State, Token

# Of a token: the channels before the convolution.
CHANNELS = "channels"
# Of the weights of a rule: D, by which what comes in is multiplied and added to what is read.
SKIP = "skip"


class Recurrence(Protocol):
    """Keeps something of the tokens for one head, beside the window of its convolution, in float32.

    It is frozen and hashable.
    """

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays that it keeps."""

    @property
    def taken_parts(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of what `update` needs of a token."""

    def understand(self, weights: Mapping[str, jax.Array], mixed: jax.Array, token: Token) -> Token:
        """Returns what `update` and `read` need of a token: of its channels after the convolution, and of the rest.

        Where all that is zero, the token changes nothing.
        """

    def update(self, state: State, token: Token) -> State:
        """Returns the state after a token that is understood."""

    def read(self, state: State, token: Token) -> jax.Array:
        """Returns what the layer reads for a token from the state after it."""

    def run(self, state: State, tokens: Token) -> tuple[State, jax.Array]:
        """Returns the state after tokens [N, ..] that follow each other, and what is read for each.

        It is what `update` and `read` make of them one after the other, but for rounding.
        """


@dataclass(frozen=True)
class RecurrentRule:
    """The `StateRule` of a convolution and the recurrence after it. A state is what that keeps, and the window."""

    conv: CausalConv | None  # None: channels come as they are, and a state has no window
    recurrence: Recurrence

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        window = () if self.conv is None else (self.conv.window,)
        return *self.recurrence.parts, *window

    @property
    def taken_parts(self) -> Mapping[str, tuple[int, ...]]:
        channels = {} if self.conv is None else {CHANNELS: (self.conv.channels,)}
        return {**channels, **self.recurrence.taken_parts}

    def take(self, weights: Mapping[str, jax.Array], state: State, token: Token) -> tuple[State, jax.Array, Token]:
        return jax.vmap(self._take)(weights, state, token)

    def take_run(
        self, weights: Mapping[str, jax.Array], state: State, tokens: Token, count: jax.Array
    ) -> tuple[State, jax.Array]:
        return jax.vmap(partial(self._take_run, count=count), in_axes=(0, 0, 1), out_axes=(0, 1))(
            weights, state, tokens
        )

    def retake(self, state: State, taken: Token) -> State:
        return jax.vmap(self._retake)(state, taken)

    # These are of one head.

    def _take(self, weights: Mapping[str, jax.Array], state: State, token: Token) -> tuple[State, jax.Array, Token]:
        kept, window = self._parted(state)
        channels = token[CHANNELS].astype(jnp.float32)
        mixed = channels if self.conv is None else self.conv.take(weights, window[0], channels)
        understood = {CHANNELS: channels, **self.recurrence.understand(weights, mixed, token)}
        taken = {name: understood[name] for name in self.taken_parts}
        state = self._retake(state, taken)
        return state, self.recurrence.read(self._parted(state)[0], understood), taken

    def _take_run(
        self, weights: Mapping[str, jax.Array], state: State, tokens: Token, count: jax.Array
    ) -> tuple[State, jax.Array]:
        kept, window = self._parted(state)
        channels = tokens[CHANNELS].astype(jnp.float32)
        mixed = channels if self.conv is None else self.conv.take_run(weights, window[0], channels)
        understood = jax.vmap(partial(self.recurrence.understand, weights))(mixed, tokens)
        # Tokens that are too much are another row's: whatever they are, nothing of them gets in.
        is_real = jnp.arange(len(channels)) < count
        understood = jax.tree.map(lambda x: jnp.where(is_real.reshape(-1, *[1] * (x.ndim - 1)), x, 0), understood)
        kept, read = self.recurrence.run(kept, understood)
        after = () if self.conv is None else (self.conv.after_run(window[0], channels, count),)
        return (*kept, *after), read

    def _retake(self, state: State, taken: Token) -> State:
        kept, window = self._parted(state)
        after = () if self.conv is None else (self.conv.after(window[0], taken[CHANNELS]),)
        return *self.recurrence.update(kept, taken), *after

    def _parted(self, state: State) -> tuple[State, State]:
        """Returns what the recurrence keeps, and the window, if there is one."""
        count = len(self.recurrence.parts)
        return state[:count], state[count:]


def one_by_one(recurrence: Recurrence, state: State, tokens: Token) -> tuple[State, jax.Array]:
    """Is a `Recurrence.run` that takes in one token after the other, where no products of matrices do the same."""

    def step(state: State, token: Token) -> tuple[State, jax.Array]:
        state = recurrence.update(state, token)
        return state, recurrence.read(state, token)

    return jax.lax.scan(step, state, tokens)


def decays(log_decays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns how much is left at token i of what came in with token j, [.., N, N], and of what was before, [.., N].

    `log_decays` [.., N] are the logarithms of what each token leaves of the state, at most 0.
    """
    total = jnp.cumsum(log_decays, axis=-1)
    since = total[..., :, None] - total[..., None, :]
    earlier = jnp.tril(jnp.ones(since.shape[-2:], bool))
    return jnp.exp(jnp.where(earlier, since, -jnp.inf)), jnp.exp(total)  # exp alone would overflow
