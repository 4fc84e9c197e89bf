"""What to plan for: a model, its devices, and the limits of a step."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from jaxvllm.config import EngineConfig
from jaxvllm.core.page_pool import pages_for
from jaxvllm.core.scheduler import check_token_budget
from jaxvllm.engine.choices import Choices
from jaxvllm.models.families import model_spec
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.planner.share import Share
from jaxvllm.planner.target import Target
from jaxvllm.runtime.buckets import Bucket, BucketLadder
from pallas_kernels.backend import Backend


@dataclass(frozen=True)
class Job:
    """Valid when made: ValueError for a config, device or number of devices that cannot be. Crosses a pipe as JSON."""

    hf_config: dict[str, Any]
    device: str
    replicas: int
    size: int  # devices that each replica is spread over
    dtype: str
    page_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int

    def __post_init__(self) -> None:
        check_token_budget(self.max_num_batched_tokens, self.max_num_seqs)
        _ = self.spread, self.target  # each is a ValueError when it cannot be

    @classmethod
    def of_config(cls, config: EngineConfig, hf_config: dict[str, Any], device: str) -> "Job":
        """What an engine of this config would run on such devices, where it leaves things open too."""
        shape = config.mesh_shape
        choices = Choices.of(config, hf_config, Target.named(device, shape.num_devices).platform)
        return cls(
            hf_config=hf_config,
            device=device,
            replicas=shape.data,
            size=shape.model,
            dtype=choices.dtype.name,
            page_dtype=choices.page_dtype.name,
            max_model_len=choices.max_model_len,
            max_num_seqs=choices.max_num_seqs,
            max_num_batched_tokens=choices.max_num_batched_tokens,
            page_size=choices.page_size,
        )

    @cached_property
    def spec(self) -> ModelSpec:
        return model_spec(self.hf_config, self.max_model_len)

    @cached_property
    def spread(self) -> Spread:
        return Spread(self.spec, self.size)

    @cached_property
    def target(self) -> Target:
        return Target.named(self.device, self.replicas * self.size)

    @property
    def backend(self) -> Backend:
        return self.target.backend(jnp.dtype(self.dtype))

    @property
    def share(self) -> Share:
        """The model's on each device."""
        return Share(self.spread, jnp.dtype(self.dtype))

    @property
    def page_bytes(self) -> int:
        """Of one page on each device."""
        return self.share.page_bytes(self.page_size, jnp.dtype(self.page_dtype), self.backend)

    @property
    def max_pages(self) -> int:
        """Of one request."""
        return pages_for(self.max_model_len, self.page_size)

    @property
    def useful_pages(self) -> int:
        """The most of a replica: every request at full length, and the trash page."""
        return self.max_num_seqs * self.max_pages + 1

    @property
    def largest(self) -> Bucket:
        """The step that holds every plan, and needs the most memory."""
        return BucketLadder.build([self.max_num_seqs], [self.max_num_batched_tokens]).largest

    @property
    def decode(self) -> Bucket:
        """The largest step in which every request decodes."""
        return Bucket(self.max_num_seqs, self.max_num_seqs)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        return cls(**json.loads(text))
