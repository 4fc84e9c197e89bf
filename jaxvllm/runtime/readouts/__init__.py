"""Readouts on the devices: what a step reports of rows beside their tokens, between its forward pass and its sampling.

A readout is one file here and one value in `core/readout.py`.
"""

from collections.abc import Mapping

from jaxvllm.runtime.readouts.distributions import Distributions
from jaxvllm.runtime.readouts.pooled import PooledVectors
from jaxvllm.runtime.readouts.readout import DeviceReadout, Forwarded, ProgramMaker, ReadProgram
from jaxvllm.runtime.readouts.routed import RoutedExperts
from jaxvllm.runtime.readouts.scores import FEW, WIDE

# In the order of `core.readout.READOUTS`.
DEVICE_READOUTS: tuple[DeviceReadout, ...] = (Distributions(), FEW, WIDE, PooledVectors(), RoutedExperts())
BY_NAME: Mapping[str, DeviceReadout] = {one.name: one for one in DEVICE_READOUTS}

__all__ = ["BY_NAME", "DEVICE_READOUTS", "DeviceReadout", "Forwarded", "ProgramMaker", "ReadProgram"]
