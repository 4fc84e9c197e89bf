"""Multi-token prediction (arXiv 2412.19437, 2.2): one more layer in a model's own checkpoint, which guesses ahead."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.decoder import project_logits, rotations
from jaxvllm.models.heads.eagle import embedded
from jaxvllm.models.heads.head import DRAFT, Declarations
from jaxvllm.models.layer_input import Attend, LayerInput, no_recur
from jaxvllm.models.linear import Linear
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from pallas_kernels.ragged_paged_attention import NO_WINDOW
from sharding.axis import ALONE, ModelAxis


@dataclass(frozen=True)
class MtpHead:
    """A layer of the model's family over the normed embedding beside the normed feature, through `fc`.

    `spec` has the layer. The embedding and the LM head are those of the model. Each head but the first sees what the
    head before it thought. `depths` names the model's last layer if the head was trained on states before a final norm,
    and nothing if it was trained on hidden states after one. What it hands on is of the same kind.
    """

    spec: ModelSpec
    depths: tuple[int, ...] = ()
    number: int = 0  # among the heads of the model
    has_final_norm: bool = True  # of its own; without one, the model's final norm stands before the LM head

    @property
    def feature_size(self) -> int:
        return self.spec.hidden_size

    @property
    def fc(self) -> Linear:
        """The projection of an embedding beside a feature."""
        E = self.spec.hidden_size
        return Linear((E, 2 * E), (None, "embed"))

    def declare(self) -> Declarations:
        """Returns the declarations of its arrays, which every device has whole."""
        norm, size = self.spec.norm, (self.spec.hidden_size,)
        names = ("embedding_norm", "feature_norm", *(("final_norm",) if self.has_final_norm else ()))
        norms = [norm.declare(name, size, (None,)) for name in names]
        outer = {name: decl for decls in (self.fc.declare("fc"), *norms) for name, decl in decls.items()}
        return outer | {"layers": [layer.declare() for layer in self.spec.layers]}

    def features(self, params: Params, hidden: jax.Array, states: jax.Array) -> jax.Array:
        return states[0] if self.depths else hidden

    def apply(
        self,
        params: Params,
        token_ids: jax.Array,
        positions: jax.Array,
        features: jax.Array,
        kv: Any,
        attend: Attend[Any],
        axis: ModelAxis,
    ) -> tuple[jax.Array, jax.Array, Any]:
        own, norm = params[DRAFT]["heads"][self.number], self.spec.norm
        embedding = embedded(params, token_ids, axis)
        parts = [norm.apply(own, "embedding_norm", embedding), norm.apply(own, "feature_norm", features)]
        x = self.fc.apply(own, "fc", jnp.concatenate(parts, axis=1))
        [layer], [weights] = self.spec.layers, own["layers"]
        rotation = rotations((layer.rope,), positions)(0)
        # Every device has the whole layer, experts too.
        window = layer.window or NO_WINDOW
        given = LayerInput(positions, rotation, attend, no_recur, ALONE, layer.memory, self.number, window)
        x, kv = layer.apply(weights, x, kv, given)
        hidden = norm.apply(own if self.has_final_norm else params, "final_norm", x)
        return hidden, x if self.depths else hidden, kv

    def logits(
        self, params: Params, hidden: jax.Array, spec: ModelSpec, shard: ModelSpec, axis: ModelAxis
    ) -> jax.Array:
        return project_logits(params, shard, hidden)
