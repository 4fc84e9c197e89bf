"""Jobs that plans are made of in tests."""

from typing import Any

from jaxvllm.config import EngineConfig
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.known_models import find_config

# Seven query heads over one KV head, and a vocabulary that no power of two divides.
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 56,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def deployment(model: str | dict[str, Any], device: str, **options: Any) -> Deployment:
    config = find_config(model)[1] if isinstance(model, str) else model
    return Deployment.of_config(EngineConfig(**options), config, device)
