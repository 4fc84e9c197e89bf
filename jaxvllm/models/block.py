"""`Block`: one layer of a decoder, which is its attention and its FFN, and the norms and sums around them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.alt_up import AltUp
from jaxvllm.models.attention import Attention
from jaxvllm.models.declaration import ParamDecl, Storage
from jaxvllm.models.expert_lora import ExpertLora
from jaxvllm.models.ffn import ChoosingFfn, Ffn
from jaxvllm.models.laurel import Laurel
from jaxvllm.models.layer_embedding import LayerEmbedding
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.layer_memory import LayerMemory
from jaxvllm.models.lora import LayerLora
from jaxvllm.models.norm import Norm
from jaxvllm.models.positive import require_positive
from jaxvllm.models.rope import RopeSpec
from jaxvllm.models.state_mixer import StateMixer

# The norms stand before attention and FFN (pre: Llama), before and after (sandwich: Gemma 2, 3), or after (post:
# OLMo 2). In a parallel block both read the hidden state through one norm, and their outputs are added to it together
# (Cohere); in a twin block each has a norm of its own (GPT-NeoX). In an open sandwich the FFN reads the hidden state
# itself, and has norms of its own (Gemma 4 with experts).
Placement = Literal["pre", "sandwich", "open_sandwich", "post", "parallel", "twin"]
_NORMS: Mapping[Placement, tuple[str, ...]] = {
    "pre": ("attention_norm", "ffn_norm"),
    "sandwich": ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"),
    "open_sandwich": ("attention_norm", "attention_post_norm", "ffn_post_norm"),
    "post": ("attention_post_norm", "ffn_post_norm"),
    "parallel": ("attention_norm",),
    "twin": ("attention_norm", "ffn_norm"),
}


@dataclass(frozen=True)
class Block:
    """The computation of one layer. Consecutive equal blocks are one loop on the device."""

    attention: Attention
    ffn: Ffn | None  # None: the layer ends after its attention, or what stands in its place
    norm: Norm
    placement: Placement = "pre"
    rope: RopeSpec | None = None
    window: int | None = None  # the last positions a token sees, itself included; None is all
    residual_scale: float = 1.0  # multiplies what attention and FFN add to the hidden state
    attention_scale: float = 1.0  # multiplies the output of its attention
    beside: StateMixer | None = None  # reads what its attention reads, and adds its output to that of attention
    reads: int | None = None  # the layer whose memory it reads, where it has none of its own
    embedding: LayerEmbedding | None = None  # what tokens mean to each layer alone, added after the FFN
    has_scale: bool = False  # one number multiplies what the layer returns
    laurel: Laurel | None = None  # a residual beside that of its attention
    states: AltUp | None = None  # the states of a token, of which the layer computes one; None: there is one
    late: Ffn | None = None  # reads what its FFN reads; the next layer adds what it returns (LongCat-Flash)
    adds_late: bool = False  # adds, after its FFN, what the layer before it has returned late
    lora: LayerLora | None = None  # its room for adapters
    expert_lora: ExpertLora | None = None  # that of its experts

    def __post_init__(self) -> None:
        require_positive(self, "window residual_scale attention_scale")
        if self.ffn is None and self.placement != "pre":
            raise ValueError(f"a layer without an FFN must have its norm before its attention, not {self.placement}")
        assert not self.is_with_late or (self.states is None and self.ffn is not None), "no model has both"

    @property
    def hidden_size(self) -> int:
        """The size of the hidden state that the layer changes, E."""
        return self.attention.hidden_size

    @property
    def is_with_late(self) -> bool:
        """Whether the layer is one of a pair, of which the second adds what the first returns late."""
        return self.late is not None or self.adds_late

    @property
    def memory(self) -> LayerMemory:
        """The memory that its attention reads, its own or another layer's."""
        return self.attention.memory(self.window)

    @property
    def memories(self) -> tuple[LayerMemory, ...]:
        """All memories of the layer, each of which differs from the others. That of its attention comes first."""
        mixers = [mixer for mixer in (self.attention, self.beside) if isinstance(mixer, StateMixer)]
        beside = () if self.beside is None else (self.beside.memory(None),)
        return self.memory, *beside, *(memory for mixer in mixers for memory in mixer.more_memories)

    @property
    def keeps_state(self) -> bool:
        """Whether one of its memories is a state."""
        return any(memory.keeps_state for memory in self.memories)

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of its norms."""
        return tuple(name for name in _NORMS[self.placement] if self.ffn is not None or name == "attention_norm")

    @property
    def lora_rooms(self) -> tuple[LayerLora, ...]:
        """The rooms of its matrices and of its experts for adapters, those that it has."""
        rooms = self.lora, None if self.expert_lora is None else self.expert_lora.room
        return tuple(room for room in rooms if room is not None)

    def in_windows(self, windows: Iterable[int | None]) -> tuple[Self, ...]:
        """Returns a layer like this one for each of `windows`."""
        return tuple(replace(self, window=window) for window in windows)

    def spread(self, size: int) -> Self:
        """Returns the same layer with sizes that divide over `size` devices."""
        ffn = None if self.ffn is None else self.ffn.spread(size)
        beside = None if self.beside is None else self.beside.spread(size)
        return replace(self, attention=self.attention.spread(size), ffn=ffn, beside=beside)

    def shard(self, size: int) -> Self:
        """Returns the part that each of `size` devices computes. The sizes must divide already."""
        ffn = None if self.ffn is None else self.ffn.shard(size)
        beside = None if self.beside is None else self.beside.shard(size)
        late = None if self.late is None else self.late.shard(size)
        return replace(self, attention=self.attention.shard(size), ffn=ffn, beside=beside, late=late)

    def declare(self) -> dict[str, ParamDecl]:
        """Returns all arrays of the layer by name."""
        parts = [self.attention.declare(), {} if self.ffn is None else self.ffn.declare()]
        parts += [self.norm.declare(name, (self.hidden_size,), ("embed",)) for name in self.norms]
        if self.beside is not None:
            parts.append(self.beside.declare())
        if self.embedding is not None:
            parts.append(self.embedding.declare_layer())
        if self.late is not None:
            parts.append(self.late.declare())
        if self.laurel is not None:
            parts.append(self.laurel.declare())
        if self.states is not None:
            parts.append(self.states.declare_layer())
        if self.has_scale:
            parts.append({"layer_scale": ParamDecl((1,), (None,), "ones")})
        if self.lora is not None:
            parts.append(self.lora.declare(self.matrices))
        if self.expert_lora is not None:
            parts.append(self.expert_lora.declare(self.expert_matrices))
        decls = {name: decl for part in parts for name, decl in part.items()}
        assert len(decls) == sum(map(len, parts)), "each array has a name of its own"
        return decls

    @property
    def matrices(self) -> dict[str, ParamDecl]:
        """The matrices of its attention and of its FFNs that multiply every token."""
        return self._stored("matrix")

    @property
    def expert_matrices(self) -> dict[str, ParamDecl]:
        """The matrices [X, .., in] of experts, each of which multiplies the tokens that have chosen it."""
        return self._stored("experts")

    def _stored(self, storage: Storage) -> dict[str, ParamDecl]:
        parts = [part.declare() for part in (self.attention, self.ffn, self.late) if part is not None]
        return {name: decl for part in parts for name, decl in part.items() if decl.storage == storage}

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        """Returns x [T, E] after the layer, and the cache with this step's keys and values.

        Where a token has several states, x is [T, A, E]. In layers with something late, the second is what is late.
        """
        if self.lora is not None and given.adapters is not None:
            weights = self.lora.bound(weights, given.adapters)
        if self.expert_lora is not None and given.adapters is not None:
            weights = self.expert_lora.bound(weights)
        if self.is_with_late:
            x, late = x[:, 0], x[:, 1]
            x, kv, h = self._computed(weights, x, kv, given)
            if self.adds_late:
                x = x + late
            late = jnp.zeros_like(x)
            if self.late is not None:
                with jax.named_scope("late"):
                    late = self.late.apply(weights, h, given)
            return jnp.stack([x, late], axis=1), kv
        if self.states is None:
            x, kv, _ = self._computed(weights, x, kv, given)
            if self.embedding is not None:
                x = x + self._of_embedding(weights, x, given)
        else:
            x = self.states.predicted(weights, x)
            computed, kv, _ = self._computed(weights, x[:, self.states.active], kv, given)
            x = self.states.corrected(weights, x, computed)
            if self.embedding is not None:
                x = x.at[:, 1:].add(self._of_embedding(weights, self.states.shown(weights, x), given)[:, None])
        return x * weights["layer_scale"].astype(x.dtype) if self.has_scale else x, kv

    def _computed(
        self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput
    ) -> tuple[jax.Array, Any, jax.Array]:
        """Returns x [T, E] after attention and FFN, the cache, and what the FFN has read."""
        before = x
        with jax.named_scope("attention"):
            h = self._normed(weights, "attention_norm", x)
            attended, kv = self.attention.apply(weights, h, kv, given)
            if self.attention_scale != 1:
                attended = attended * self.attention_scale
            if self.beside is not None:
                mixed, kv = self.beside.apply(weights, h, kv, replace(given, memory=self.beside.memory(None)))
                attended = attended + mixed
            x = x + self._added(weights, "attention_post_norm", attended)
            if self.laurel is not None:
                x = (x + self.laurel.apply(weights, h)) * jnp.asarray(2**-0.5, x.dtype)
        if self.ffn is not None:
            with jax.named_scope("ffn"):
                if self.placement != "parallel":
                    h = self._normed(weights, "ffn_norm", before if self.placement == "twin" else x)
                out, kv = _fed(self.ffn, weights, h, kv, given)
                x = x + self._added(weights, "ffn_post_norm", out)
        return x, kv, h

    def _of_embedding(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        assert self.embedding is not None and given.embedding is not None, (
            "a model whose layers have some looks them up"
        )
        with jax.named_scope("layer_embedding"):
            return self.embedding.apply(weights, x, given.embedding)

    def _normed(self, weights: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
        return self.norm.apply(weights, name, x) if name in self.norms else x

    def _added(self, weights: Mapping[str, Any], post_norm: str, x: jax.Array) -> jax.Array:
        """Returns the values that attention or FFN adds to the hidden state."""
        x = self._normed(weights, post_norm, x)
        return x if self.residual_scale == 1 else x * jnp.asarray(self.residual_scale, x.dtype)


def _fed(ffn: Ffn, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
    """Returns what an FFN makes of x [T, E], and the cache, in which what tokens choose is counted."""
    if given.count is None or not isinstance(ffn, ChoosingFfn):
        return ffn.apply(weights, x, given), kv
    out, chosen = ffn.apply_choosing(weights, x, given)
    return out, given.count(kv, chosen)
