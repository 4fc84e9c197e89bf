"""The architectures of GGUF files whose keys and values are made of a latent, with an index or without."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.published import gguf_latent_keys as keys
from jaxvllm.models.published import gguf_names as names
from jaxvllm.models.published import gguf_rebuilt
from jaxvllm.models.published.gguf_architecture import EXPERT_KEYS, GgufArchitecture

_LATENT_KEYS = (
    *EXPERT_KEYS,
    "expert_shared_count",
    "leading_dense_block_count",
    "rope.dimension_count",
    "attention.kv_lora_rank",
    "attention.key_length",
    "attention.value_length",
)
_DEEPSEEK_V2 = GgufArchitecture(
    "DeepseekV2ForCausalLM",
    {
        **names.USUAL,
        **names.LATENT,
        **names.EXPERTS,
        **names.SHARED_EXPERT,
        **names.NEXT_TOKENS,
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    keys.deepseek_v2,
    needs=_LATENT_KEYS,
    understood=("expert_weights_scale",),
    rebuilt=gguf_rebuilt.LATENT,
    is_latent=True,
    steepness=10.0,
)
DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2,
    family="DeepseekV3ForCausalLM",
    own_keys=keys.deepseek_v3,
    usual_values={"expert_gating_func": 2},
)
_INDEX_KEYS = tuple(f"attention.indexer.{key}" for key in ("head_count", "key_length", "top_k"))
_DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    family="DeepseekV32ForCausalLM",
    tensors={**DEEPSEEK_V3.tensors, **names.INDEX},
    own_keys=keys.deepseek_v32,
    needs=(*_LATENT_KEYS, *_INDEX_KEYS),
)
LATENT: Mapping[str, GgufArchitecture] = {
    "deepseek2": _DEEPSEEK_V2,
    "deepseek32": _DEEPSEEK_V32,
    "glm-dsa": replace(_DEEPSEEK_V32, family="GlmMoeDsaForCausalLM", own_keys=keys.glm_moe_dsa),
}
