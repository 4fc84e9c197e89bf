"""`run_if`: a conditional that copies nothing: a loop of at most one turn."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def run_if[Carry](condition: jax.Array, run: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Returns `run(carry)` where `condition` bool is true, and `carry` elsewhere.

    XLA:GPU copies all pages for a conditional: 1029 MiB of temporaries beside a pool of 1 GiB, and 38 MiB for two loops
    of at most one turn (compiled HLO for H200, jax 0.11.2).
    """

    def turn(left: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        return jnp.zeros_like(condition), run(left[1])

    return jax.lax.while_loop(lambda left: left[0], turn, (condition, carry))[1]
