"""jaxvllm: LLM inference and serving in JAX, on TPU, NVIDIA GPU and CPU. This is the whole public API.

Importing it is cheap: jax and the rest are imported when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxvllm.config import EngineConfig as EngineConfig
    from jaxvllm.core.beam import BeamSearchParams as BeamSearchParams
    from jaxvllm.core.lora import LoRARequest as LoRARequest
    from jaxvllm.core.pooling_params import PoolingParams as PoolingParams
    from jaxvllm.core.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from jaxvllm.core.sampling_params import RequestOutputKind as RequestOutputKind
    from jaxvllm.core.sampling_params import SamplingParams as SamplingParams
    from jaxvllm.core.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from jaxvllm.core.weight_version import WeightVersionSpan as WeightVersionSpan
    from jaxvllm.engine.llm import LLM as LLM
    from jaxvllm.engine.multihost import follow as follow
    from jaxvllm.engine.outputs import CompletionOutput as CompletionOutput
    from jaxvllm.engine.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from jaxvllm.engine.outputs import RequestOutput as RequestOutput
    from jaxvllm.runtime.logits_processors import LogitsProcessor as LogitsProcessor
    from jaxvllm.runtime.logits_processors import TokensSoFar as TokensSoFar
    from jaxvllm.worker.async_llm import AsyncLLM as AsyncLLM

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "jaxvllm.worker.async_llm",
    "LLM": "jaxvllm.engine.llm",
    "LoRARequest": "jaxvllm.core.lora",
    "follow": "jaxvllm.engine.multihost",
    "EngineConfig": "jaxvllm.config",
    "LogitsProcessor": "jaxvllm.runtime.logits_processors",
    "TokensSoFar": "jaxvllm.runtime.logits_processors",
    "BeamSearchParams": "jaxvllm.core.beam",
    "SamplingParams": "jaxvllm.core.sampling_params",
    "RepetitionDetectionParams": "jaxvllm.core.sampling_params",
    "StructuredOutputsParams": "jaxvllm.core.structured_outputs",
    "RequestOutputKind": "jaxvllm.core.sampling_params",
    "PoolingParams": "jaxvllm.core.pooling_params",
    "EmbeddingRequestOutput": "jaxvllm.engine.outputs",
    "RequestOutput": "jaxvllm.engine.outputs",
    "CompletionOutput": "jaxvllm.engine.outputs",
    "WeightVersionSpan": "jaxvllm.core.weight_version",
}

__all__ = [
    "LogitsProcessor",
    "TokensSoFar",
    "LLM",
    "LoRARequest",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "RepetitionDetectionParams",
    "PoolingParams",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "WeightVersionSpan",
    "follow",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
