"""Gemma 3n, text only, alone or inside the multimodal checkpoint.

A token has four hidden states, of which layers compute one (AltUp), and a learned residual stands beside attention
(Laurel). As in Gemma 4, tokens mean something to each layer alone, and the last layers read the keys and values of an
earlier one of their kind. Gates in the first layers let the largest few features through.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

from jaxvllm.models.alt_up import AltUp
from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family, beside_vision
from jaxvllm.models.families.gemma3 import rope_entries
from jaxvllm.models.families.gemma4 import (
    BESIDE_TEXT,
    LAYER_EMBEDDINGS,
    last_own_layer,
    layer_embedding_sources,
    value_normed_attention,
)
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import Ffn, GatedFfn, ThresholdFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.laurel import Laurel
from jaxvllm.models.layer_embedding import LayerEmbedding
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    OuterNames,
    Source,
    attention_sources,
    gated_ffn_sources,
    named_norms,
    norm_sources,
    whole,
    with_biases,
)

# The names of tensors outside the layers are those of so many states at most.
_MOST_STATES = 8


def gemma3n_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(
        vocab_size=262_400,
        hidden_size=2048,
        num_hidden_layers=35,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    sizes = usual.head_size, usual.max_position
    of_full, of_sliding = rope_entries(config)
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    num_states = config.integer("altup_num_inputs", 4)
    if num_states > _MOST_STATES:
        raise ValueError(f"config altup_num_inputs must be at most {_MOST_STATES}, not {num_states}")
    attention = value_normed_attention(usual, norm)
    ffn_sizes = config.of_layers("intermediate_size", 16_384)
    sparse = [0.95] * (10 if usual.num_layers > 10 else 0)
    sparsities = config.of_layers("activation_sparsity_pattern", sparse + [0.0] * (usual.num_layers - len(sparse)))

    def ffn(number: int) -> Ffn:
        """Returns the FFN of a layer, whose gates let through the part of the features that its sparsity leaves."""
        dense, sparsity = GatedFfn(usual.hidden_size, int(ffn_sizes[number]), activation), sparsities[number]
        if not sparsity:
            return dense
        return ThresholdFfn(dense.hidden_size, dense.size, activation, threshold=NormalDist().inv_cdf(sparsity))

    full = Block(
        norm=norm,
        placement="sandwich",
        attention=attention,
        ffn=ffn(0),
        rope=config.rope(of_full, config.number("rope_theta", 1_000_000.0), *sizes),
        embedding=LayerEmbedding(
            config.integer("hidden_size_per_layer_input", 256),
            usual.num_layers,
            usual.hidden_size,
            activation,
            norm,
            known_tokens=config.integer("vocab_size_per_layer_input", 262_144),
        ),
        states=AltUp(
            usual.hidden_size,
            num_states,
            config.integer("altup_active_idx", 0, least=0),
            norm,
            config.flag("altup_correct_scale", True),
        ),
        laurel=Laurel(usual.hidden_size, config.integer("laurel_rank", 64), norm),
    )
    sliding = replace(
        full,
        window=config.integer("sliding_window", 512),
        rope=config.rope(of_sliding, config.number("rope_local_base_freq", 10_000.0), *sizes),
    )
    kinds = config.layer_types_by_period(usual.num_layers, 5)
    own = usual.num_layers - config.integer("num_kv_shared_layers", 15, least=0)

    def layer(number: int) -> Block:
        """Returns a layer of its kind. The last ones read the last earlier one of their kind."""
        kind = replace(sliding if kinds[number] == "sliding_attention" else full, ffn=ffn(number))
        if number < own:
            return kind
        return replace(kind, attention=replace(attention, kv="none"), reads=last_own_layer(kinds, own, number))

    return replace(
        usual.model(map(layer, range(usual.num_layers)), norm),
        max_position=usual.max_position,
        logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
        embed_scale=usual.hidden_size**0.5,
    )


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls = declare_layer(spec, layer)
    matrices = {
        "laurel_left": "laurel.linear_left",
        "laurel_right": "laurel.linear_right",
        "altup_router": "altup.modality_router",
        "altup_correct": "altup.correction_coefs",
    }
    norms = {"laurel_norm": "laurel.post_laurel_norm", "altup_norm": "altup.router_norm"}
    found = norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    found |= gated_ffn_sources(spec, layer, prefix) | with_biases(decls, prefix, matrices)
    found |= named_norms(decls, prefix, norms) | layer_embedding_sources(decls, prefix)
    A, _, _ = predict = decls["altup_predict"].shape
    found["altup_predict"] = whole(f"{prefix}altup.prediction_coefs.weight", (A * A, A), predict)
    # The tensor is there where it multiplies nothing, too.
    if "altup_scale" in decls:
        found["altup_scale"] = whole(f"{prefix}altup.correct_output_scale", decls["altup_scale"].shape)
    return found


_STATES = [
    (f"altup_{way}_{number}", f"{projections}.{number - 1}.weight")
    for way, projections in (("in", "altup_projections"), ("out", "altup_unembed_projections"))
    for number in range(1, _MOST_STATES)
]
NAMES = OuterNames(others=(*LAYER_EMBEDDINGS, *_STATES))
# Published checkpoints have keys and values of layers that read those of another, and they are never read.
REDUNDANT = (
    ".self_attn.k_proj.weight",
    ".self_attn.v_proj.weight",
    ".self_attn.k_norm.weight",
    ".altup.correct_output_scale",
)
FAMILY = Family("Gemma3nForCausalLM", gemma3n_spec, layer_sources=sources, names=NAMES, redundant=REDUNDANT)
_BESIDE = beside_vision("Gemma3nForConditionalGeneration", gemma3n_spec)
FAMILIES = (
    FAMILY,
    replace(
        _BESIDE,
        layer_sources=sources,
        names=NAMES,
        redundant=REDUNDANT,
        foreign=(*_BESIDE.foreign, *BESIDE_TEXT),
    ),
)
