"""Muon for the matrices inside the layers, and Adam for embeddings and norms, written out because the update is short.

Muon: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. The step of a matrix is its
momentum made orthogonal by five Newton-Schulz iterations.
"""

from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tools.demo_model import Params

MUON_RATE, ADAM_RATE = 0.02, 0.004
MOMENTUM, BETA1, BETA2, EPSILON = 0.95, 0.9, 0.95, 1e-8
DECAY = 0.02
# Coefficients of the quintic iteration that drives singular values to about 1.
QUINTIC = (3.4445, -4.7750, 2.0315)


class Moments(NamedTuple):
    """The first moments of every tensor, and the second moments of those that Adam updates."""

    first: Params
    second: Params


def _is_hidden(name: str) -> bool:
    return name.endswith("_proj.weight")


def start(params: Params) -> Moments:
    """Returns zero moments."""
    first = {name: jnp.zeros_like(value) for name, value in params.items()}
    return Moments(first, {name: jnp.zeros_like(value) for name, value in params.items() if not _is_hidden(name)})


def _orthogonal(matrix: jax.Array) -> jax.Array:
    """Returns a matrix [rows <= columns] with the same singular vectors, and singular values near 1."""
    a, b, c = QUINTIC
    x = matrix / (jnp.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _muon(updates: Params) -> Params:
    """Orthogonalises matrices of one shape together, in one loop, which keeps the compiled program small."""
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, value in updates.items():
        groups[tuple(sorted(value.shape))].append(name)
    steps: Params = {}
    for names in groups.values():
        flat = [
            updates[name] if updates[name].shape[0] <= updates[name].shape[1] else updates[name].T for name in names
        ]
        for name, matrix in zip(names, jax.lax.map(_orthogonal, jnp.stack(flat)), strict=True):
            rows, columns = updates[name].shape
            steps[name] = (matrix if rows <= columns else matrix.T) * max(1.0, rows / columns) ** 0.5
    return steps


def update(
    params: Params, gradients: Params, moments: Moments, step: jax.Array, schedule: jax.Array
) -> tuple[Params, Moments]:
    """Returns parameters and moments after one step. `schedule` f32[] scales both learning rates; `step` counts from 1."""
    first: Params = {}
    second: Params = {}
    new: Params = {}
    nesterov: Params = {}
    for name, gradient in gradients.items():
        if _is_hidden(name):
            first[name] = MOMENTUM * moments.first[name] + (1 - MOMENTUM) * gradient
            nesterov[name] = MOMENTUM * first[name] + (1 - MOMENTUM) * gradient
            continue
        first[name] = BETA1 * moments.first[name] + (1 - BETA1) * gradient
        second[name] = BETA2 * moments.second[name] + (1 - BETA2) * gradient * gradient
        mean = first[name] / (1 - BETA1**step)
        spread = jnp.sqrt(second[name] / (1 - BETA2**step)) + EPSILON
        new[name] = params[name] - schedule * ADAM_RATE * mean / spread
    for name, direction in _muon(nesterov).items():
        rate = schedule * MUON_RATE
        new[name] = params[name] * (1 - rate * DECAY) - rate * direction
    return new, Moments(first, second)
