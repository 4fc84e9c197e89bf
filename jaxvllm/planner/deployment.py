"""The deployment that a plan is for: a model, its devices, and the limits of a step."""

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxvllm.config import EngineConfig
from jaxvllm.core.page_pool import pages_for
from jaxvllm.core.scheduler import check_token_budget
from jaxvllm.core.step_sizes import step_overhead
from jaxvllm.engine.kv_cache_dtype import kv_quantization
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.gguf_file import split_files
from jaxvllm.models.expert_exchange import ExchangeChoice
from jaxvllm.models.experts import by_expert, replicas_of
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.hf_weights import StoredWeights
from jaxvllm.models.kv_scales import with_kv_scales
from jaxvllm.models.params import Layout, num_parameters
from jaxvllm.models.published import published_encoding
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.stored_forms import expected_forms, stored_forms
from jaxvllm.planner.share import Share
from jaxvllm.planner.target import Target
from jaxvllm.runtime.buckets import Bucket, BucketLadder
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.pipeline import Pipeline
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.ragged_paged_attention import KVQuantization
from sharding.axis import StageAxis
from sharding.mesh import MeshShape


@dataclass(frozen=True)
class Deployment:
    """A model on its devices. Raises ValueError for an impossible config, device or number of devices.

    It crosses a pipe as JSON. A model in a GGUF file has the forms that the file's list of tensors tells, of which none
    is read.
    """

    hf_config: dict[str, Any]
    device: str
    replicas: int
    stages: int  # parts of the layers of each replica
    size: int  # devices that each stage is spread over
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    quantization: str | None = None
    enable_expert_parallel: bool = False
    num_redundant_experts: int | None = None  # slots beyond one for each expert; None: experts do not move
    all_to_all: bool | None = None  # how tokens come to the experts that replicas share, as in `ExchangeChoice`
    gguf: str | None = None  # the path of the file that has the weights; None: the config alone is known

    def __post_init__(self) -> None:
        check_token_budget(self.max_num_batched_tokens, self.max_num_seqs)
        _ = self.spread, self.target  # each raises ValueError when it is impossible

    @classmethod
    def of_config(
        cls, config: EngineConfig, hf_config: dict[str, Any], device: str, gguf: Path | None = None
    ) -> "Deployment":
        """Returns the deployment of an engine with this config, which fills in the engine's own choices.

        The weights are in the file `gguf`, if there is one, of which `hf_config` was made.
        """
        shape = config.mesh_shape
        target = Target.named(device, shape.num_devices)
        resolved = ResolvedConfig.of(config, hf_config, target.platform, target.multiplies_bf16)
        return cls(
            hf_config=hf_config,
            device=device,
            replicas=shape.data,
            stages=shape.stages,
            size=shape.model,
            dtype=resolved.dtype.name,
            kv_cache_dtype=config.kv_cache_dtype,
            max_model_len=resolved.max_model_len,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            page_size=resolved.page_size,
            quantization=resolved.quantization,
            enable_expert_parallel=config.enable_expert_parallel,
            num_redundant_experts=None if config.eplb is None else config.eplb.num_redundant_experts,
            all_to_all=config.all_to_all,
            gguf=None if gguf is None else str(gguf),
        )

    @property
    def num_parameters(self) -> int:
        """The weights of the model, without copies of experts."""
        return num_parameters(self._plain_spec)

    @property
    def stored_bytes(self) -> int | None:
        """The bytes of the files that have the weights, if these are known."""
        return None if self.gguf is None else sum(file.stat().st_size for file in split_files(Path(self.gguf)))

    @cached_property
    def kv_quantization(self) -> KVQuantization | None:
        """The way in which pages hold keys and values. None stands for the dtype of the weights."""
        return kv_quantization(self.kv_cache_dtype, self.hf_config, jnp.dtype(self.dtype))

    @property
    def _plain_spec(self) -> ModelSpec:
        """The model as its checkpoint has it: without scales of keys and values, and with each expert once."""
        return model_spec(self.hf_config, self.max_model_len)

    @cached_property
    def spec(self) -> ModelSpec:
        spec = self._plain_spec
        if self.kv_quantization is not None and not self.kv_quantization.by_token:
            spec = with_kv_scales(spec)
        if not self.enable_expert_parallel:
            return spec
        return by_expert(
            spec,
            self.num_redundant_experts,
            self.replicas,
            ExchangeChoice(self.target.platform, self.size, self.all_to_all),
        )

    @cached_property
    def spread(self) -> Spread:
        return Spread(self.spec, self.size, self.stages)

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(self.replicas, self.size, self.stages)

    @property
    def compiled_mesh(self) -> MeshShape:
        """The mesh of one program: that of a replica, or of all that share experts."""
        return self.mesh if replicas_of(self.spec) > 1 else replace(self.mesh, data=1)

    @property
    def pipeline(self) -> Pipeline:
        """The microbatches into which the steps of a replica are cut."""
        overhead = step_overhead(on_cpu=self.target.platform == "cpu")
        return Pipeline.of(self.spec, StageAxis(self.stages), overhead, self.page_size)

    @cached_property
    def target(self) -> Target:
        return Target.named(self.device, self.mesh.num_devices)

    @property
    def backend(self) -> Backend:
        return self.target.backend(jnp.dtype(self.dtype))

    @property
    def attention(self) -> Backend:
        """The kernels that attend, where the layers with keys and values are alike."""
        memories = [layer.memory for layer in self.spec.layers if not layer.memory.keeps_state]
        return memories[0].backend(self.backend) if memories else REFERENCE

    @property
    def layout(self) -> Layout:
        """The layout of the layers, which is that of `ResolvedConfig`."""
        return "separate" if self.target.platform == "cpu" and self.stages == 1 else "stacked"

    @cached_property
    def share(self) -> Share:
        """The share of the model on each device."""
        return Share(self.spread, jnp.dtype(self.dtype), self.forms, self.layout)

    @cached_property
    def forms(self) -> Forms:
        """The forms of the matrices, which need no turning to be counted and compiled.

        A quantized checkpoint is taken to have all matrices of its layers so, because the config alone is read. The
        list of tensors of a GGUF file is read as well. Raises ValueError that names a tensor which is not as the
        metadata say.
        """
        by_tile = self.layout == "separate"
        forms = Forms.chosen(self.quantization, self.backend, may_turn=False, by_tile=by_tile, shards=self.size)
        dtype = jnp.dtype(self.dtype)
        if self.quantization is not None and by_tile and self.compiled_mesh.num_devices == 1:
            # An engine rounds the LM head, too, where our own kernels for this CPU take it.
            kernels = self.target.matrix_kernels(dtype)
            own = Forms.chosen(self.quantization, kernels, may_turn=True, by_tile=by_tile, dtype=dtype)
            forms = replace(forms, head=own.head, table=own.table)
        if self.gguf is not None:
            weights = StoredWeights.open(Path(self.gguf), self.hf_config, self._plain_spec)
            if forms.stored is not None:
                kernels = self.target.matrix_kernels(dtype)
                forms = replace(forms, stored=FewBitsForms(kernels, by_tile, self.size))
            return replace(forms, own=stored_forms(weights, self.spread, self.layout, self.dtype, forms))
        encoding = published_encoding(self.hf_config)
        if encoding is None:
            return forms
        return replace(forms, own=expected_forms(encoding, self.spread, self.dtype, forms))

    @property
    def page_bytes(self) -> float:
        """The bytes that one page of keys and values, in every layer of a stage, takes of each device on average."""
        return self.share.page_bytes(self.page_size, self.backend, self.kv_quantization)

    @property
    def state_bytes(self) -> float:
        """The bytes that the states of one request, in every layer of a stage, take of each device on average."""
        return self.share.state_bytes(self.page_size, self.backend)

    @property
    def token_bytes(self) -> float:
        """The bytes of one token's keys and values in all layers, on all devices of a replica together."""
        return self.page_bytes * self.mesh.replica_devices / self.page_size

    @property
    def max_pages(self) -> int:
        """The most pages of one request."""
        return pages_for(self.max_model_len, self.page_size)

    @property
    def useful_pages(self) -> int:
        """The most pages that a replica can use: those of all requests at full length, and the trash page."""
        return self.cache_shape(2).useful_pages(self.spec)

    def cache_shape(self, num_pages: int) -> CacheShape:
        """Returns the cache of an engine that has `num_pages` pages of the group of layers that sees most."""
        return CacheShape(
            num_pages=num_pages,
            page_size=self.page_size,
            num_slots=self.max_num_seqs,
            max_pages=self.max_pages,
            dtype=jnp.dtype(self.dtype),
            step_tokens=self.max_num_batched_tokens,
            counts_loads=self.num_redundant_experts is not None,
            quantization=self.kv_quantization,
        )

    def pool_bytes(self, num_pages: int) -> int:
        """Returns the bytes of each device that `num_pages` pages of that group, and the other groups' pages, take."""
        return self.cache_shape(num_pages).device_bytes(self.spread, self.backend)

    def empty_share(self, num_tokens: int) -> float:
        """Returns which part of the pages for so many tokens is for layers that only other stages have."""
        return self.cache_shape(num_tokens // self.page_size + 1).empty_share(self.spread, self.backend)

    @property
    def largest(self) -> Bucket:
        """The step that holds every plan and needs the most memory."""
        return BucketLadder.build([self.max_num_seqs], [self.max_num_batched_tokens]).largest

    @property
    def decode(self) -> Bucket:
        """The largest step in which every request decodes."""
        return Bucket(self.max_num_seqs, self.max_num_seqs)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Deployment":
        return cls(**json.loads(text))
