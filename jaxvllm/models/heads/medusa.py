"""Medusa heads (arXiv 2401.10774): each guesses a token further ahead from the model's last hidden state alone."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.decoder import project_logits
from jaxvllm.models.heads.head import DRAFT, Declarations
from jaxvllm.models.heads.vocabulary import in_columns, share_of
from jaxvllm.models.linear import Linear
from jaxvllm.models.ops import project
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from sharding.axis import ModelAxis


@dataclass(frozen=True)
class MedusaHeads:
    """`num_heads` heads of `num_layers` residual blocks each, over hidden states of the model's size.

    There is an LM head for each of them, or one for all, or none beside the model's. Where its `vocab_size` is not the
    model's number of tokens, an array of columns says which tokens it has.
    """

    hidden_size: int
    num_heads: int
    num_layers: int
    num_lm_heads: int
    vocab_size: int
    num_tokens: int  # that the model has
    has_biases: bool = False
    has_columns: bool = False

    @property
    def block(self) -> Linear:
        """The projection of each residual block."""
        return Linear((self.hidden_size, self.hidden_size), (None, "embed"), self.has_biases)

    def declare(self) -> Declarations:
        """Returns the declarations of its arrays, which every device has whole."""
        decls: Declarations = {
            "blocks": [[self.block.declare("weight") for _ in range(self.num_layers)] for _ in range(self.num_heads)]
        }
        if self.num_lm_heads:
            head = ParamDecl((self.vocab_size, self.hidden_size), ("vocab", "embed"), storage="matrix")
            decls["lm_heads"] = [head] * self.num_lm_heads
        if self.has_columns:
            decls["columns"] = ParamDecl((self.num_tokens,), (None,), dtype="int32")
        return decls

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
                x = x + jax.nn.silu(self.block.apply(block, "weight", x))
            if "lm_heads" not in own:
                logits.append(project_logits(params, shard, x))
                continue
            lm_heads = own["lm_heads"]  # one for each, or one for all
            of_head = project(x, lm_heads[min(number, len(lm_heads) - 1)], dtype=jnp.float32)
            if "columns" in own:
                of_head = in_columns(of_head, own["columns"])
            logits.append(share_of(of_head, spec, shard, axis))
        return jnp.stack(logits)
