"""`EngineSetup`: what decides the plans of an engine, without its weights and devices."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Self

from jaxvllm.config import EngineConfig
from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.policy import POLICIES, Policy
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import StepPlan
from jaxvllm.core.step_sizes import StepSizes, step_overhead
from jaxvllm.engine.build import bucket_ladder
from jaxvllm.engine.burst_pace import SERVING_SECONDS
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.device_memory import Memory
from jaxvllm.planner.target import CPU
from jaxvllm.ranges import MOST_REPLICAS, Range, check_ranges
from jaxvllm.runtime.buckets import Bucket, BucketLadder


@dataclass(frozen=True)
class EngineSetup:
    """The limits, pages and compiled shapes of an engine that has `num_replicas` equal replicas, all compiled."""

    num_replicas: Annotated[int, Range(1, MOST_REPLICAS)]
    groups: Sequence[GroupSize]  # pages of each replica
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    ladder: BucketLadder
    step_overhead: int  # what a step costs beside its tokens, in tokens: see `StepSizes`
    policy: Policy = POLICIES["v1"]
    enable_prefix_caching: bool = True
    routing_policy: str = "least-load"
    burst_seconds: float = SERVING_SECONDS

    def __post_init__(self) -> None:
        check_ranges(self, written_as_flags=False)

    @classmethod
    def of_deployment(cls, config: EngineConfig, deployment: Deployment) -> Self:
        """Returns the setup of an engine with this config on the devices of `deployment`.

        Unless the config says how many, it has as many pages as fit beside the weights, by the planner's rule, without
        the temporaries of a step: nothing is compiled. Raises ValueError when the model does not fit.
        """
        platform = deployment.target.platform
        resolved = ResolvedConfig.of(config, deployment.hf_config, platform, deployment.target.multiplies_bf16)
        num_pages = config.num_pages
        if num_pages is None:
            memory = Memory.of(deployment, 0, config.memory_utilization, deployment.page_size)
            num_pages = memory.num_tokens // deployment.page_size + 1
            if num_pages < 2:
                raise ValueError(
                    f"{config.model} leaves no memory for keys and values on a mesh of {config.mesh} "
                    f"{deployment.device}: raise the M of --mesh DxM"
                )
        return cls(
            num_replicas=deployment.replicas,
            groups=deployment.cache_shape(num_pages).group_sizes(deployment.spec),
            page_size=deployment.page_size,
            max_model_len=deployment.max_model_len,
            max_num_seqs=deployment.max_num_seqs,
            max_num_batched_tokens=deployment.max_num_batched_tokens,
            ladder=bucket_ladder(config, resolved, platform),
            step_overhead=step_overhead(on_cpu=platform == CPU),
            policy=POLICIES[config.scheduler],
            enable_prefix_caching=config.enable_prefix_caching,
            routing_policy=config.routing_policy,
        )

    def make_scheduler(self) -> Scheduler:
        """Returns the scheduler of a replica, idle."""
        cache = KVCache(
            self.groups,
            num_slots=self.max_num_seqs,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            max_chunk=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
        )
        return Scheduler(
            SlotTable(self.max_num_seqs, self.max_model_len), cache, self.policy, self.max_num_batched_tokens
        )

    @cached_property
    def step_sizes(self) -> StepSizes:
        """The sizes of steps with prompts, as `Runner.step_sizes` tells them once all are compiled."""
        sizes = [(b.num_tokens, b.num_rows) for b in self.ladder.buckets if b.num_tokens > b.num_rows]
        return StepSizes(sizes, self.step_overhead)

    @property
    def burst_width(self) -> int:
        """The most decode steps of one program."""
        return 1 if self.ladder.widest is None else self.ladder.widest.width


@dataclass(frozen=True)
class BucketChoice:
    """The bucket that an engine takes for a plan without masks and drafts. It remembers what it chose."""

    ladder: BucketLadder
    _chosen: dict[tuple[int, int, bool, bool], Bucket] = field(default_factory=dict)

    def of_plan(self, plan: StepPlan) -> Bucket:
        return self.of(plan.num_tokens, plan.num_rows, plan.num_decode == plan.num_rows, plan.row_tokens > 1)

    def of(self, num_tokens: int, num_rows: int, is_decode: bool, is_burst: bool) -> Bucket:
        """Returns the cheapest bucket for so many tokens and rows, by the rule of `BucketLadder.choose`."""
        key = (num_tokens, num_rows, is_decode, is_burst)
        bucket = self._chosen.get(key)
        if bucket is None:
            fitting = [
                one
                for one in self.ladder.buckets
                if num_tokens <= one.num_tokens and num_rows <= one.num_rows
                if (one.is_decode and is_decode) or not (one.is_decode or is_burst)
            ]
            bucket = min(fitting, key=lambda one: (one.num_tokens, one.num_rows))
            self._chosen[key] = bucket
        return bucket
