"""Chooses the places of a layer's experts, so that devices have equally much to do.

Experts that are chosen most have several copies.

Devices have equally many slots, and those of a device follow each other. A slot has a copy of one expert, or of none.
Loads are numbers of tokens that have chosen each expert. Tokens take the copies of an expert in turn, so that each copy
has an equal part of its load.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

type Ints = NDArray[np.int32]

NOTHING = -1  # in a slot: no expert; in a table of slots: no other copy
# Experts move only if the busiest device then has at most this share of what it had: loads of the last steps tell those
# of the next ones only about, and a new placement of all experts moves most of them.
WORTH_MOVING = 0.95


@dataclass(frozen=True)
class SlotChange:
    """One change of slots: `to` gets a copy of what is in `source`, and with `is_swap` also the other way round."""

    source: int
    to: int
    is_swap: bool


def experts_in(slots: Ints, num_slots: int) -> Ints:
    """Returns the expert in each slot, i32[slots], of what `slots_of` has returned."""
    held = np.full(num_slots, NOTHING, np.int32)
    expert, copy = np.nonzero(slots != NOTHING)
    held[slots[expert, copy]] = expert
    return held


def slots_of(held: Ints, num_experts: int, most_copies: int) -> Ints:
    """Returns the slots of each expert, i32[experts, most copies], for the expert in each slot."""
    slots = np.full((num_experts, most_copies), NOTHING, np.int32)
    for expert in range(num_experts):
        own = np.flatnonzero(held == expert)
        slots[expert, : len(own)] = own
    return slots


def device_loads(held: Ints, loads: NDArray[np.float64], num_devices: int) -> NDArray[np.float64]:
    """Returns what each device has to do, f64[devices], for the expert in each slot and the load of each expert."""
    num_copies = np.bincount(held[held != NOTHING], minlength=len(loads))
    of_slots = np.where(held == NOTHING, 0, (loads / np.maximum(num_copies, 1))[held])
    return of_slots.reshape(num_devices, -1).sum(1)


def balanced(held: Ints, loads: NDArray[np.float64], num_devices: int) -> Ints:
    """Returns the expert in each slot so that the busiest device has less to do than with those in `held`.

    Where no placement is found that is worth it, `held` is returned. Experts that stay on a device stay in their slots.
    """
    copies = _num_copies(loads, len(held), num_devices)
    wanted = _kept_in_place(held, _packed(loads, copies, len(held) // num_devices, num_devices))
    now, then = (device_loads(one, loads, num_devices).max() for one in (held, wanted))
    return wanted if then < WORTH_MOVING * now else held


def _num_copies(loads: NDArray[np.float64], num_slots: int, num_devices: int) -> Ints:
    """Returns how many copies each expert has: one more, time after time, for that whose copies have most to do.

    A second copy on the same device would share nothing out.
    """
    copies = np.ones(len(loads), np.int32)
    for _ in range(min(num_slots, len(loads) * num_devices) - len(loads)):
        copies[np.argmax(np.where(copies < num_devices, loads / copies, -1.0))] += 1
    return copies


def _packed(loads: NDArray[np.float64], copies: Ints, room: int, num_devices: int) -> list[set[int]]:
    """Returns the experts of each device, at most `room`: the busiest copies first, each where there is least to do.

    A copy is left out where all devices with room have one of the same expert already.
    """
    each = loads / copies
    devices, busy = [set[int]() for _ in range(num_devices)], np.zeros(num_devices)
    for expert in np.argsort(-each, kind="stable").tolist():
        for _ in range(copies[expert]):
            free = [d for d in range(num_devices) if len(devices[d]) < room and expert not in devices[d]]
            if free:
                device = min(free, key=lambda d: (busy[d], len(devices[d])))
                devices[device].add(expert)
                busy[device] += each[expert]
    return devices


def _kept_in_place(held: Ints, devices: list[set[int]]) -> Ints:
    """Returns the expert in each slot for the experts of each device.

    An expert that is on the device already stays in its slot. A device with fewer copies than slots has nothing in the
    others.
    """
    wanted = np.full(len(held), NOTHING, np.int32)
    of_devices = (slots.reshape(len(devices), -1) for slots in (wanted, held))
    for own, now, experts in zip(*of_devices, devices, strict=True):
        left = set(experts)
        for slot, expert in enumerate(now.tolist()):
            if expert in left:
                own[slot] = expert
                left.remove(expert)
        own[np.flatnonzero(own == NOTHING)[: len(left)]] = sorted(left)
    return wanted


def exchanges(held: Ints, wanted: Ints) -> Iterator[SlotChange]:
    """Yields changes, one after the other, that put the experts into the slots where they are `wanted`.

    Each leaves a copy of every expert somewhere, and each leaves fewer slots with another expert than the wanted one.
    A slot in which nothing is wanted may keep anything. Every expert must be held and wanted somewhere.
    """
    held = held.copy()
    for slot in np.flatnonzero(wanted != NOTHING).tolist():
        while held[slot] != wanted[slot]:
            lost = held[slot]
            if lost == NOTHING or np.count_nonzero(held == lost) > 1:
                source = int(np.flatnonzero(held == wanted[slot])[0])
                yield SlotChange(source, slot, is_swap=False)
                held[slot] = wanted[slot]
            else:  # the only copy goes where it is wanted, which it is in no slot that has it
                to = int(np.flatnonzero(wanted == lost)[0])
                yield SlotChange(slot, to, is_swap=True)
                held[slot], held[to] = held[to], lost
