"""One engine over several processes: process 0 leads, and the others follow it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import jax

import jaxvllm
from jaxvllm.config import EngineConfig
from jaxvllm.engine.build import EngineParts, build
from jaxvllm.runtime.logits_processors import LogitsProcessor
from jaxvllm.runtime.multihost.agreement import agree
from jaxvllm.runtime.multihost.follower import Follower
from jaxvllm.runtime.multihost.leader import Leader
from jaxvllm.runtime.multihost.link import say
from sharding.hosts import ALONE, Hosts, join

# Options that may differ between the processes: they say which process this is, where it keeps its files, and how often
# process 0 answers, which in `serve` depends on the cores of its host.
_OWN = ("multihost", "coordinator", "num_processes", "process_id", "compilation_cache", "max_outputs_per_second")


def follow(model: str = "demo", **options: Any) -> bool:
    """Computes for process 0 until process 0 closes its engine, then returns True. In process 0, returns False at once.

    The options are those of `LLM`, and must be the same in every process. So the same program runs on every host:

        options = dict(model="...", mesh="1x8", multihost=True)
        if not jaxvllm.follow(**options):
            with jaxvllm.LLM(**options) as llm:
                ...
    """
    return follow_config(EngineConfig.from_options(model=model, **options))


def follow_config(config: EngineConfig, tell: Callable[[], None] | None = None) -> bool:
    """Does the same as `follow` for a config. Calls `tell` once it is clear that this process follows."""
    hosts = _hosts(config)
    if hosts.leads:
        return False
    say(f"{hosts} follows process 0")
    if tell is not None:
        tell()
    with Follower(hosts, _facts(config)) as follower:
        [runner] = build(config, hosts).holders
        follower.follow(runner)
    return True


def lead(config: EngineConfig, logits_processors: tuple[LogitsProcessor, ...] = ()) -> EngineParts:
    """Builds the engine in process 0. The other processes of the config build the same and follow.

    Raises ValueError in any other process, when the others were started with another config, and for functions where
    there are others.
    """
    if logits_processors and config.has_others:
        raise ValueError("logits_processors are functions, which other processes cannot get: use one process")
    hosts = _hosts(config)
    if not hosts.leads:
        with suppress(ValueError):  # takes part in the comparison, or process 0 would wait for this process
            agree(hosts, _facts(config, others_call="LLM"))
        raise ValueError(f"this is {hosts}, and only process 0 takes requests: call jaxvllm.follow with these options")
    if hosts.count == 1:
        return build(config, logits_processors=logits_processors)
    leader = Leader(hosts, _facts(config))
    try:
        return build(config, hosts, leader)
    except BaseException:
        leader.abandon()
        raise


def _hosts(config: EngineConfig) -> Hosts:
    if not config.has_others:
        return ALONE
    shape = config.mesh_shape
    if shape.data > 1 and not config.shares_experts:
        raise NotImplementedError(
            f"mesh {shape} has {shape.data} replicas, and several processes share one, or replicas that share experts: "
            f"use {replace(shape, data=1)} and start as many groups of processes, or enable_expert_parallel"
        )
    return join(config.coordinator, config.num_processes, config.process_id)


def _facts(config: EngineConfig, others_call: str = "follow") -> dict[str, object]:
    """Returns the facts that must be equal in all processes, or else they would not compute the same steps."""
    options = {name: value for name, value in asdict(config).items() if name not in _OWN}
    versions = {"jaxvllm": jaxvllm.__version__, "jax": jax.__version__}
    return {"what processes other than 0 call": others_call} | versions | options
