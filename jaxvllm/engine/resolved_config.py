"""`ResolvedConfig`: an engine's settings once its model and platform have filled in what its config leaves open."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp

from jaxvllm.config import EngineConfig
from jaxvllm.core.page_pool import pages_for
from jaxvllm.core.scheduler import check_token_budget
from jaxvllm.core.side_input import SideInputRules
from jaxvllm.engine.kv_cache_dtype import kv_quantization
from jaxvllm.models import checkpoint
from jaxvllm.models.expert_exchange import ExchangeChoice
from jaxvllm.models.experts import by_expert, num_experts
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.forms import Forms
from jaxvllm.models.kv_scales import with_kv_scales
from jaxvllm.models.params import Layout
from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.expert_choices import ChoiceShape
from jaxvllm.runtime.proposers import Proposer
from jaxvllm.runtime.side_rows import SideShape
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.cpu.host import kernels_multiply_bfloat16
from pallas_kernels.ragged_paged_attention import KVQuantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedConfig:
    """The settings of an engine, none of them open. The engine and the planner resolve a config in this one way."""

    hf_config: dict[str, Any]  # the model's config.json, with what the user has replaced in it
    spec: ModelSpec
    max_model_len: int  # tokens
    dtype: jnp.dtype  # of weights and activations
    layout: Layout
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    kv_quantization: KVQuantization | None  # of keys and values; None: they have the dtype above
    quantization: str | None  # of the layers' matrices
    takes_side_inputs: bool
    counts_loads: bool  # of experts

    @classmethod
    def of(
        cls, config: EngineConfig, hf_config: Mapping[str, Any], platform: str, multiplies_bf16: bool = True
    ) -> Self:
        """Resolves `config` for the model whose config.json is `hf_config`, on devices of `platform`.

        multiplies_bf16: whether their matrix units do
        Raises ValueError when config and model do not go together.
        """
        on_cpu = platform == "cpu"
        read = config.overridden(hf_config)
        # The length goes into the spec because some RoPE scalings depend on it.
        spec = model_spec(read, config.max_model_len)
        if config.enable_expert_parallel:
            num_redundant = None if config.eplb is None else config.eplb.num_redundant_experts
            exchange = ExchangeChoice(platform, config.mesh_shape.model, config.all_to_all)
            spec = by_expert(spec, num_redundant, config.mesh_shape.data, exchange)
        if config.count_expert_loads and not num_experts(spec):
            raise ValueError("count_expert_loads needs a model with experts, and this one has none: leave it out")
        if config.enable_return_routed_experts:
            ChoiceShape.of(spec)  # raises
            if config.mesh_shape.stages > 1:
                raise NotImplementedError(
                    "enable_return_routed_experts needs all layers on one device: take a mesh without stages"
                )
        dtype = _dtype(config, read, platform, multiplies_bf16)
        quantization = kv_quantization(config.kv_cache_dtype, read, dtype)
        if quantization is not None and not quantization.by_token:
            spec = with_kv_scales(spec)
        if config.enable_prompt_embeds and spec.layer_embedding is not None:
            raise NotImplementedError(
                "enable_prompt_embeds needs a model without embeddings for each layer, which are those of tokens: "
                "leave it out, or take another model"
            )
        # The limits of a step in requests and in tokens. If the config sets only one, the other adapts to it.
        seqs, tokens = (64, 512) if on_cpu else (256, 2048)
        max_num_seqs = config.max_num_seqs or min(seqs, config.max_num_batched_tokens or seqs)
        max_num_batched_tokens = config.max_num_batched_tokens or max(tokens, max_num_seqs)
        check_token_budget(max_num_batched_tokens, max_num_seqs)
        return cls(
            hf_config=read,
            spec=spec,
            max_model_len=config.max_model_len or spec.max_position,
            dtype=dtype,
            # XLA reads these layouts without a copy: see `models.params`. Stages divide stacks, on a CPU too.
            layout="separate" if on_cpu and config.mesh_shape.stages == 1 else "stacked",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=config.page_size,
            kv_quantization=quantization,
            quantization=config.quantization,
            takes_side_inputs=config.enable_prompt_embeds,
            counts_loads=config.counts_loads,
        )

    def forms(self, backend: Backend, num_devices: int, shards: int) -> Forms:
        """Returns the forms of the matrices of the model on `num_devices` devices, `shards` of which have a replica."""
        # Only the arrays of single layers are turned, or packed.
        may_turn = self.layout == "separate" and num_devices == 1
        by_tile = self.layout == "separate"
        return Forms.chosen(self.quantization, self._kernels(backend), may_turn, by_tile, shards, self.dtype)

    def draft_forms(self, backend: Backend, num_devices: int) -> Forms:
        """Returns the forms of the matrices of a draft model or heads, which are not rounded or turned.

        Each of the `num_devices` computes them whole, so their forms are those of one device.
        """
        kernels, by_tile = self._kernels(backend), self.layout == "separate"
        may_pack = by_tile and num_devices == 1 and kernels.kind == "cpu"
        return Forms.chosen(None, kernels, may_pack, by_tile, dtype=self.dtype)

    def _kernels(self, backend: Backend) -> Backend:
        """Returns the kernels that multiply by matrices of weights."""
        # On a CPU they read only the arrays of single layers. Several devices there are virtual, for proving what real
        # ones will do, not for speed.
        return REFERENCE if backend.kind == "cpu" and self.layout != "separate" else backend

    def cache_shape(self, num_pages: int, proposer: Proposer | None = None) -> CacheShape:
        """Returns the shape of a cache with slots for all requests at full length, and what `proposer` keeps or reads.

        `num_pages` are the pages of the group of layers that sees most.
        """
        return CacheShape(
            num_pages=num_pages,
            page_size=self.page_size,
            num_slots=self.max_num_seqs,
            max_pages=pages_for(self.max_model_len, self.page_size),
            dtype=self.dtype,
            step_tokens=self.max_num_batched_tokens,
            draft=None if proposer is None else proposer.cache,
            has_index=proposer is not None and proposer.reads_index,
            has_drafts=proposer is not None,
            side=self._side_shape,
            counts_loads=self.counts_loads,
            quantization=self.kv_quantization,
        )

    @property
    def _side_shape(self) -> SideShape | None:
        """The shape of the store of side inputs, or None if there is none.

        The longest prompt has room. A row takes little beside the keys and values of its token, in all layers.
        """
        if not self.takes_side_inputs:
            return None
        return SideShape(self.max_model_len, self.spec.hidden_size, self.dtype)

    @property
    def side_inputs(self) -> SideInputRules | None:
        """The side inputs that the engine takes, or None if it takes none."""
        if not self.takes_side_inputs:
            return None
        largest = jnp.finfo(self.dtype).max  # type: ignore[no-untyped-call]
        return SideInputRules(self.spec.hidden_size, float(largest))


def _dtype(
    config: EngineConfig, hf_config: Mapping[str, Any], platform: str, multiplies_bf16: bool = True
) -> jnp.dtype:
    if config.dtype == "float16" and platform == "tpu":
        # Our kernel has no float16 on TPU either, and XLA's attention in float16 copies all pages there.
        raise ValueError("TPUs have no float16: set dtype to bfloat16 or auto")
    family = find_family(hf_config)
    if config.dtype == "float16" and family.exceeds_float16:
        raise ValueError(
            f"hidden states of {family.architecture} are beyond the largest number of float16: set dtype to bfloat16, "
            "float32 or auto"
        )
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    if platform == "cpu":
        # XLA emulates 16 bits there and takes several times as long as in float32. Our kernels have one instruction for
        # bfloat16 on some CPUs, and a decode step takes about half of the time.
        has_kernels = config.attention_backend in ("auto", "cpu") and kernels_multiply_bfloat16()
        is_bfloat16 = has_kernels and checkpoint.stated_dtype(hf_config) == "bfloat16"
        return jnp.dtype("bfloat16" if is_bfloat16 else "float32")
    stated = checkpoint.config_dtype(hf_config)
    is_refused = stated == "float16" and (platform == "tpu" or family.exceeds_float16)
    chosen = "bfloat16" if is_refused else stated
    if chosen == "bfloat16" and not multiplies_bf16:  # such devices would convert each matrix to float32
        chosen = "float32" if family.exceeds_float16 else "float16"
        logger.warning("this device does not multiply bfloat16, so the model computes in %s", chosen)
    return jnp.dtype(chosen)
