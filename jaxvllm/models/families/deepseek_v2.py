"""DeepSeek V2: latent attention, dense layers first, and then experts whose softmax over all is what they count."""

import math
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertGroups, ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.sparse_indexer import SparseIndexer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, named_norms, sparse_projections, whole, with_biases

# Checkpoints norm latents with this, whatever rms_norm_eps their configs have.
LATENT_EPS = 1e-6


def deepseek_v2_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"norm_topk_prob": (None, False), "scoring_func": (None, "softmax")})
    groups = None
    if config.choice("topk_method", "greedy", ("greedy", "group_limited_greedy")) != "greedy":
        groups = ExpertGroups(config.integer("n_group"), config.integer("topk_group"), best=1)
    router = ExpertRouter(
        config.integer("hidden_size"),
        config.integer("n_routed_experts", 64),
        config.integer("num_experts_per_tok"),
        is_normalized=False,
        scale=config.number("routed_scaling_factor", 1.0),
        groups=groups,
    )
    config = config.with_defaults(moe_intermediate_size=1407, n_shared_experts=2, first_k_dense_replace=0)
    return latent_model(config, router)


def latent_model(config: HfConfig, router: ExpertRouter, indexer: SparseIndexer | None = None) -> ModelSpec:
    """Returns the model with latent attention, whose first layers are dense, and whose others have experts."""
    config.refuse({"moe_layer_freq": (None, 1)})
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    size = config.integer("moe_intermediate_size")
    shared_size = size * (config.optional_integer("n_shared_experts", least=0) or 0)
    dense, experts = usual.gated_ffn(), usual.experts(router, size, shared_size)
    attention = replace(latent_attention(config), indexer=indexer)
    parameters, theta = config.rope_parameters(), config.number("rope_theta", 10_000.0)
    rope = config.rope(parameters, theta, attention.rope_size, usual.max_position)
    layers = (
        Block(norm=norm, attention=attention, ffn=experts if is_sparse else dense, rope=rope)
        for is_sparse in config.sparse_layers(config.integer("first_k_dense_replace", least=0))
    )
    return usual.model(layers, norm)


def latent_attention(config: HfConfig) -> LatentAttention:
    """Returns the attention of a config that has `kv_lora_rank`."""
    content, rope = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    parameters = config.rope_parameters()
    scale = (content + rope) ** -0.5
    # YaRN makes logits steeper by this square, beside what it does to cos and sin (arXiv 2309.00071, 3.4).
    if parameters.get("mscale_all_dim") and parameters["factor"] > 1:
        scale *= (0.1 * parameters["mscale_all_dim"] * math.log(parameters["factor"]) + 1) ** 2
    return LatentAttention(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        q_rank=config.optional_integer("q_lora_rank", 1536),
        latent_size=config.integer("kv_lora_rank", 512),
        content_size=content,
        rope_size=rope,
        value_size=config.integer("v_head_dim", 128),
        norm=RmsNorm(LATENT_EPS),
        scale=scale,
        rope_pairs="neighbours" if config.flag("rope_interleave", True) else "halves",
        has_bias=config.flag("attention_bias", False),
    )


def latent_attention_sources(
    spec: ModelSpec, layer: int, prefix: str, inputs: str = "self_attn.", output: str = "o_proj"
) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of latent attention."""
    decls, attention, start = declare_layer(spec, layer), spec.layers[layer].attention, f"{prefix}{inputs}"
    assert isinstance(attention, LatentAttention)
    norms = {"q_latent_norm": "q_a_layernorm", "kv_latent_norm": "kv_a_layernorm"}
    sources = with_biases(decls, start, {"o": output}) | named_norms(decls, start, norms)
    rank, of_key = attention.q_rank or 0, attention.latent_size + attention.rope_size
    parts = [("q_a_proj", 0, rank)] * bool(rank) + [("kv_a_proj_with_mqa", rank, of_key)]
    for key, kind in (("latents", "weight"), ("latents_bias", "bias")):
        if key in decls:
            tail = decls[key].shape[1:]
            sources[key] = tuple(
                Source(f"{start}{name}.{kind}", (size, *tail), (first, *(0 for _ in tail)), (size, *tail))
                for name, first, size in parts
            )
    q_name = f"{start}{'q_b_proj' if rank else 'q_proj'}.weight"
    sources["q"] = whole(q_name, decls["q"].shape[1:], decls["q"].shape)
    # One tensor has, for each head, what makes its key and then what makes its value.
    content, value, latent = attention.content_size, attention.value_size, attention.latent_size
    shape = (attention.num_heads * (content + value), latent)
    for key, first, size in (("k_up", 0, content), ("v_up", content, value)):
        begins = [head * (content + value) + first for head in range(attention.num_heads)]
        sources[key] = tuple(
            Source(f"{start}kv_b_proj.weight", shape, (0, head, 0, 0), (1, 1, size, latent), slice(at, at + size))
            for head, at in enumerate(begins)
        )
    return sources


FAMILY = Family(
    "DeepseekV2ForCausalLM",
    deepseek_v2_spec,
    layer_sources=sparse_projections("shared_experts", attention=latent_attention_sources),
)
