"""DeepSeek V3.2: a DeepSeek V3 whose queries attend to the 2,048 positions that an index chooses."""

from jaxvllm.models.families.deepseek_v2 import latent_attention_sources, latent_model
from jaxvllm.models.families.deepseek_v3 import v3_defaults
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import deepseek_router
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.rotation import RopePairs
from jaxvllm.models.sparse_indexer import SparseIndexer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, named_norms, sparse_projections, with_biases

INDEX_EPS = 1e-6


def deepseek_v32_spec(config: HfConfig) -> ModelSpec:
    config = v3_defaults(config)
    return latent_model(config, deepseek_router(config), sparse_indexer(config, 64, "halves"))


def sparse_indexer(config: HfConfig, num_heads: int, rope_pairs: RopePairs) -> SparseIndexer:
    """Returns the index of a config, with `num_heads` by default."""
    return SparseIndexer(
        hidden_size=config.integer("hidden_size"),
        q_rank=config.integer("q_lora_rank", 1536),
        num_heads=config.integer("index_n_heads", num_heads),
        head_size=config.integer("index_head_dim", 128),
        top_k=config.integer("index_topk", 2048),
        norm=LayerNorm(INDEX_EPS),
        rope_pairs=rope_pairs,
    )


def indexed_attention_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of latent attention with an index."""
    decls, start = declare_layer(spec, layer), f"{prefix}self_attn.indexer."
    sources = latent_attention_sources(spec, layer, prefix) | named_norms(decls, start, {"index_k_norm": "k_norm"})
    names = {"index_q": "wq_b", "index_k": "wk", "index_weights": "weights_proj"}
    return sources | with_biases(decls, start, names)


SOURCES = sparse_projections(
    "shared_experts", attention=indexed_attention_sources, router_choice="gate.e_score_correction_bias"
)
FAMILY = Family("DeepseekV32ForCausalLM", deepseek_v32_spec, layer_sources=SOURCES)
