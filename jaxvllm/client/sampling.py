"""How a client asks a server to sample: what is not set is left to the server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Fields of a request's body, by their names there. The server checks the values."""

    temperature: float | None = None  # 0 is greedy; higher is more random
    top_p: float | None = None  # only the likeliest tokens that together have this probability
    top_k: int | None = None  # only this many of the likeliest tokens
    min_p: float | None = None  # only tokens with this share of the likeliest one's probability
    max_tokens: int | None = None  # at most this many tokens an answer
    seed: int | None = None  # the same seed gives the same answer
    stop: tuple[str, ...] | None = None  # ends the answer before this text; may be repeated
