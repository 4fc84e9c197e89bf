"""`EngineExperts`: how often each expert of an engine's model is chosen, and what moves experts by that."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxvllm.config import EngineConfig
from jaxvllm.engine.expert_balancer import ExpertBalancer, LoadMeter
from jaxvllm.models.experts import num_experts
from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.runner import Runner


class EngineExperts:
    """The meters and balancers of all replicas. There are none where nobody counts, and where nothing moves."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, holders: Sequence[Runner]):
        self._num_experts = num_experts(spec)
        self.meters = tuple(LoadMeter(holder) for holder in holders if holder.load_shape is not None)
        self.balancers: tuple[ExpertBalancer, ...] = ()
        if config.eplb is not None:
            of_holders = zip(holders, self.meters, strict=True)
            self.balancers = tuple(ExpertBalancer(config.eplb, holder, meter) for holder, meter in of_holders)

    def loads(self, *, are_counted: bool) -> dict[int, NDArray[np.int64]]:
        """Returns how many tokens have chosen each expert since the start, i64[experts], by the number of the layer.

        `are_counted`: the devices have counts now; where pages sleep, they have not. Raises ValueError where nobody
        counts at all.
        """
        if not self.meters:
            raise ValueError("nobody counts which experts are chosen: set count_expert_loads or enable_eplb")
        if are_counted:
            for meter in self.meters:
                meter.take()
        for meter in self.meters:
            meter.read()
        total = np.sum([meter.total for meter in self.meters], axis=0)
        return {layer: total[layer, :count] for layer, count in self._num_experts.items()}

    def drop(self) -> None:
        """Forgets what was measured and decided in steps that broke off."""
        for meter in self.meters:
            meter.drop()
        for balancer in self.balancers:
            balancer.drop()
