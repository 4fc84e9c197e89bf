"""GLM-5 to 5.2: a DeepSeek V3.2 of other sizes, whose index turns neighbours.

Most layers of GLM-5.2 have no index, and attend to what that of an earlier layer has chosen.
"""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.deepseek_v2 import latent_model
from jaxvllm.models.families.deepseek_v32 import SOURCES, sparse_indexer
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import deepseek_router
from jaxvllm.models.families.mtp_format import MtpFormat
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.spec import ModelSpec

FULL, SHARED = "full", "shared"


def glm_moe_dsa_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(
        n_routed_experts=256, routed_scaling_factor=2.5, moe_intermediate_size=2048, n_shared_experts=1,
        first_k_dense_replace=3, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5,
    )  # fmt: skip
    spec = latent_model(config, deepseek_router(config), sparse_indexer(config, 32, "neighbours"))
    [attention] = {layer.attention for layer in spec.layers}
    assert isinstance(attention, LatentAttention), "latent models have nothing else"
    of_kind = {FULL: attention, SHARED: replace(attention, indexer="last")}
    kinds = zip(spec.layers, _indexer_types(config), strict=True)
    return replace(spec, layers=tuple(replace(layer, attention=of_kind[kind]) for layer, kind in kinds))


def _indexer_types(config: HfConfig) -> list[str]:
    """Returns for each layer whether it has an index, from a list, a pattern of F and S, or a period."""
    num_layers, pattern = config.integer("num_hidden_layers"), config.values.get("index_topk_pattern")
    if pattern is None:
        period, first = config.integer("index_topk_freq", 1), config.integer("index_skip_topk_offset", 2, least=0)
        types = [SHARED if max(number - first + 1, 0) % period else FULL for number in range(num_layers)]
    elif isinstance(pattern, str) and len(pattern) == num_layers and set(pattern) <= {"F", "S"}:
        types = [FULL if letter == "F" else SHARED for letter in pattern]
    else:
        raise ValueError(f"config index_topk_pattern must be a text of {num_layers} letters F and S, not {pattern!r}")
    return config.layer_types(types, (FULL, SHARED), key="indexer_types")


def mtp_block(spec: ModelSpec) -> Block:
    """Returns the block of an MTP head: the last layer, with an index of its own."""
    return replace(spec.layers[-1], attention=spec.layers[0].attention)


FAMILY = Family("GlmMoeDsaForCausalLM", glm_moe_dsa_spec, layer_sources=SOURCES, mtp=MtpFormat(block_of=mtp_block))
