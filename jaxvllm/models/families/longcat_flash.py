"""LongCat-Flash: layers in pairs. Experts read what the FFN of the first one reads, and are added after the second.

Some experts return their input. Attention is latent, and its latents are multiplied by constants.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.families.deepseek_v2 import latent_attention, latent_attention_sources
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mtp_format import MtpFormat
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, expert_sources, gated_sources, named_norms, whole


def longcat_flash_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"hidden_act": (None, "silu"), "zero_expert_type": (None, "identity"), "router_bias": (None, False)})
    num_pairs = config.integer("num_layers", 28)
    names = {"intermediate_size": "ffn_hidden_size", "moe_intermediate_size": "expert_ffn_hidden_size"}
    config = config.with_defaults(
        num_hidden_layers=2 * num_pairs,
        max_position_embeddings=131_072,
        **{ours: config.values[theirs] for ours, theirs in names.items() if theirs in config.values},
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    attention = latent_attention(config)
    of_queries = (usual.hidden_size / config.integer("q_lora_rank", 1536)) ** 0.5
    attention = replace(
        attention,
        scale=attention.scale * of_queries,
        latent_scale=(usual.hidden_size / attention.latent_size) ** 0.5,
    )
    num_experts = config.integer("n_routed_experts", 512)
    num_identities = config.optional_integer("zero_expert_num", 256, least=0) or 0
    router = ExpertRouter(
        usual.hidden_size,
        num_experts + num_identities,
        config.integer("moe_topk", 12),
        is_normalized=False,
        scale=config.number("routed_scaling_factor", 6.0),
        has_choice_bias=True,
    )
    experts = ExpertsFfn(
        usual.hidden_size, config.integer("moe_intermediate_size", 2048), router, num_identities=num_identities
    )
    rope = config.rope(
        config.rope_parameters(), config.number("rope_theta", 10_000_000.0), attention.rope_size, usual.max_position
    )
    second = Block(norm=norm, attention=attention, ffn=usual.gated_ffn(), rope=rope, adds_late=True)
    first = replace(second, late=experts, adds_late=False)
    return usual.model((first, second) * num_pairs, norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, which is one half of a layer of the checkpoint."""
    start, half = prefix.removesuffix(f"{layer}."), layer % 2
    prefix, decls = f"{start}{layer // 2}.", declare_layer(spec, layer)
    norms = {"attention_norm": f"input_layernorm.{half}", "ffn_norm": f"post_attention_layernorm.{half}"}
    found = named_norms(decls, prefix, norms) | gated_sources(decls, f"{prefix}mlps.{half}.")
    found |= latent_attention_sources(spec, layer, prefix, inputs=f"self_attn.{half}.")
    if "router" not in decls:
        return found
    found |= expert_sources(decls, f"{prefix}mlp.experts.")
    tensors = {"router": "classifier.weight", "router_choice": "e_score_correction_bias"}
    return found | {key: whole(f"{prefix}mlp.router.{name}", decls[key].shape) for key, name in tensors.items()}


def mtp_block(spec: ModelSpec) -> Block:
    """Returns the block of the MTP head: the first layer of a pair, without what it returns late."""
    return replace(spec.layers[0], late=None)


def mtp_sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of that block, whose tensors have no number of a half."""
    decls = declare_layer(spec, layer)
    norms = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    found = named_norms(decls, prefix, norms) | gated_sources(decls, f"{prefix}transformer_layer.mlp.")
    return found | dict(latent_attention_sources(spec, layer, prefix))


MTP = MtpFormat(
    block="{prefix}mtp.layers.{number}.",
    embedding_norm="{block}enorm.m",
    feature_norm="{block}hnorm.m",
    final_norm="{prefix}mtp.norm",
    others="{prefix}mtp.",
    copies=("{prefix}mtp.embed_tokens.weight",),
    usual_count=1,
    block_of=mtp_block,
    sources=mtp_sources,
)
FAMILY = Family(
    "LongcatFlashForCausalLM",
    longcat_flash_spec,
    layer_sources=sources,
    foreign=("model.mtp.",),
    # transformers writes gates and features for experts that return their input, too, and nothing for their outputs.
    redundant=(".gate_proj.weight", ".up_proj.weight"),
    understood=("num_local_experts",),
    mtp=MTP,
)
