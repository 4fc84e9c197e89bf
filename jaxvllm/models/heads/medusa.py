"""Medusa heads (arXiv 2401.10774): each guesses a token further ahead from the model's last hidden state alone."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxvllm.models.decoder import project_logits
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.heads.vocabulary import in_columns, share_of
from jaxvllm.models.ops import project
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from sharding.axis import ModelAxis


@dataclass(frozen=True)
class MedusaHeads:
    """`num_heads` heads of `num_layers` residual blocks each, over hidden states of the model's size."""

    hidden_size: int
    num_heads: int
    num_layers: int

    def logits(
        self, params: Params, hidden: jax.Array, count: int, spec: ModelSpec, shard: ModelSpec, axis: ModelAxis
    ) -> jax.Array:
        """Returns this device's share f32[count, R, V] of the logits that the first heads make of `hidden` [R, E].

        A row's state comes from the model's final norm, for the last token that is computed. The model has sampled the
        next token already, so head n guesses the token n + 2 places later.
        """
        own = params[DRAFT]
        logits = []
        for number in range(count):
            x = hidden
            for block in own["blocks"][number]:
                x = x + jax.nn.silu(project(x, block["weight"], block.get("bias")))
            if "lm_heads" not in own:
                logits.append(project_logits(params, shard, x))
                continue
            lm_heads = own["lm_heads"]  # one for each, or one for all
            of_head = project(x, lm_heads[min(number, len(lm_heads) - 1)], dtype=jnp.float32)
            if "columns" in own:
                of_head = in_columns(of_head, own["columns"])
            logits.append(share_of(of_head, spec, shard, axis))
        return jnp.stack(logits)
