"""Tokens at random for the first Mamba and for short convolutions, and what takes them in by hand."""

from collections.abc import Callable

import numpy as np

from pallas_kernels.linear_attention.cases import ChannelCase
from pallas_kernels.linear_attention.channel_tokens import ChannelTokens, WindowTokens
from tests.pallas_kernels.state_steps import with_padding

# Lets a state f64[size, C] take in a token, by number, of a head, and returns what is read of it.
type ByHand = Callable[[np.ndarray, int, int], np.ndarray]


def scan_step(case: ChannelCase, dtype: str) -> tuple[ChannelTokens, ByHand]:
    random, (T, K, C, S) = np.random.default_rng(0), (case.num_tokens, case.num_heads, case.num_channels, case.size)
    x, dt = random.normal(size=(T, K, C)), random.exponential(size=(T, K, C))
    b, c = (np.repeat(random.normal(size=(T, 1, S)), K, axis=1).astype(np.float32) for _ in range(2))
    pace, skip = -random.exponential(size=(K, S, C)), random.normal(size=(K, C))
    tokens = ChannelTokens(
        *(of.astype(np.float32) for of in (pace, skip)), with_padding(case, x, dtype), dt.astype(np.float32), b, c
    )

    def by_hand(state: np.ndarray, token: int, head: int) -> np.ndarray:
        x, dt, b, c = (of[token, head].astype(np.float64) for of in tokens[2:])
        state *= np.exp(dt * tokens.pace[head])
        state += dt * x * b[:, None]
        return c @ state + tokens.skip[head] * x

    return tokens, by_hand


def window_step(case: ChannelCase, dtype: str, has_activation: bool) -> tuple[WindowTokens, ByHand]:
    random, (K, C) = np.random.default_rng(0), (case.num_heads, case.num_channels)
    taps, bias = random.normal(size=(K, case.size + 1, C)), random.normal(size=(K, C))
    channels = with_padding(case, random.normal(size=(case.num_tokens, K, C)), dtype)
    tokens = WindowTokens(taps.astype(np.float32), bias.astype(np.float32), channels)

    def by_hand(state: np.ndarray, token: int, head: int) -> np.ndarray:
        seen = np.concatenate([state, tokens.channels[token, head].astype(np.float64)[None]])
        state[:] = seen[1:]
        mixed = np.sum(seen * tokens.taps[head], axis=0) + tokens.bias[head]
        return mixed / (1 + np.exp(-mixed)) if has_activation else mixed

    return tokens, by_hand
