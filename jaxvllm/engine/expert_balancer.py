"""The loads of the experts of a mesh, as the host knows them, and the placement of experts by these loads."""

import logging
from collections import deque

import jax
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.eplb_config import EplbConfig
from jaxvllm.core.expert_placement import balanced, device_loads
from jaxvllm.runtime.runner import Runner

logger = logging.getLogger(__name__)


class LoadMeter:
    """Adds up how many tokens have chosen each expert of each layer, i64[L, X], as the device has counted them."""

    def __init__(self, runner: Runner):
        assert runner.load_shape is not None, "the devices count loads"
        self._runner = runner
        self._shape = runner.load_shape
        self._coming: deque[tuple[jax.Array, bool]] = deque()  # each with whether a window begins after it
        zeros = np.zeros(runner.load_shape, np.int64)
        self.total = zeros  # of all that was read
        self.window = zeros  # of what was read since the window has begun

    def take(self, begins_window: bool = False) -> None:
        """Asks for what was counted until now, and returns at once."""
        self._coming.append((self._runner.take_expert_loads(), begins_window))

    @property
    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        return all(part.is_ready() for part, _ in self._coming)  # type: ignore[attr-defined]  # jax hides it

    def read(self) -> None:
        """Adds all that was asked for."""
        while self._coming:
            part, begins_window = self._coming.popleft()
            counts = np.asarray(part).astype(np.int64).reshape(-1, *self._shape).sum(0)  # of all replicas of the mesh
            self.total = self.total + counts
            self.window = np.zeros_like(counts) if begins_window else self.window + counts

    def drop(self) -> None:
        """Forgets what is still coming from devices whose step broke off."""
        self._coming.clear()


class ExpertBalancer:
    """Places experts by load while their replicas serve: between two steps, those of one layer at a time.

    Every `step_interval` steps the loads of the last `window_size` decide. Until there are any, all experts count as
    equally busy.
    """

    def __init__(self, config: EplbConfig, runner: Runner, meter: LoadMeter):
        """Places the experts that were just loaded, so that no slot is empty."""
        assert runner.expert_slots is not None, "the model has experts that may move"
        self._config = config
        self._runner = runner
        self._slots = runner.expert_slots
        self._meter = meter
        self._window_begins = config.step_interval - min(config.window_size, config.step_interval)
        self._num_steps = 0  # dispatched so far
        self._first_step = 0  # after which the present interval has begun
        self._has_begun = False  # the window
        self._is_over = False  # the window: its loads are coming
        self._left: deque[int] = deque()  # layers whose experts are yet to be placed
        self.num_placements = 0  # times that experts of a layer were moved
        # What decided so far, in tokens that chose an expert, in all layers together.
        self.mean_load = 0.0  # of a device
        self.most_load = 0.0  # of the busiest device of each layer
        self.place_all()

    def place_all(self) -> None:
        """Places the experts of all layers at once, as after their weights were loaded."""
        self._left.clear()
        for layer in self._slots.ffns:
            self._place(layer)

    def between_steps(self, num_steps: int) -> None:
        """Does what is due between two steps, of which `num_steps` were dispatched so far."""
        self._num_steps = num_steps
        passed = num_steps - self._first_step
        if self._left:
            self._place(self._left.popleft())
        elif self._is_over and self._meter.is_ready:
            self._meter.read()
            self._first_step, self._has_begun, self._is_over = num_steps, False, False
            self._note_loads()
            self._left.extend(self._slots.ffns)
        elif not self._has_begun and passed >= self._window_begins:
            self._meter.take(begins_window=True)
            self._has_begun = True
        elif not self._is_over and passed >= self._config.step_interval:
            self._meter.take()
            self._is_over = True

    def drop(self) -> None:
        """Begins a new interval, because a step broke off, and what was counted is lost."""
        self._first_step, self._has_begun, self._is_over = self._num_steps, False, False

    def _note_loads(self) -> None:
        loads = [device_loads(self._slots.held[n], self._loads(n), self._slots.num_devices) for n in self._slots.ffns]
        mean, most = sum(float(of.mean()) for of in loads), sum(float(of.max()) for of in loads)
        self.mean_load += mean
        self.most_load += most
        if self._config.log_balancedness and most:
            logger.info("experts: mean load of a device / load of the busiest one = %.3f", mean / most)

    def _loads(self, layer: int) -> NDArray[np.float64]:
        """Returns the loads of a layer that decide, f64[experts]."""
        window = self._meter.window[layer, : self._slots.ffns[layer].router.num_experts]
        return window.astype(np.float64) if window.any() else np.ones(len(window))

    def _place(self, layer: int) -> None:
        held = self._slots.held[layer]
        wanted = balanced(held, self._loads(layer), self._slots.num_devices)
        if wanted is not held:
            self._runner.place_experts(layer, wanted)
            self.num_placements += 1
