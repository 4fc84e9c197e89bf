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
# A placement that is not made anew may be so much worse than one that is: it leaves most experts where they are.
NEAR = 1.02


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
    room = len(held) // num_devices
    changed = _changed(held, loads / copies, copies, room)
    anew = _filled([set() for _ in range(num_devices)], loads / copies, copies, room)
    few, many = (_kept_in_place(held, devices) for devices in (changed, anew))
    now, after_few, after_many = (device_loads(one, loads, num_devices).max() for one in (held, few, many))
    wanted, then = (few, after_few) if after_few <= after_many * NEAR else (many, after_many)
    return wanted if then < WORTH_MOVING * now else held


def _num_copies(loads: NDArray[np.float64], num_slots: int, num_devices: int) -> Ints:
    """Returns how many copies each expert has: one more, time after time, for that whose copies have most to do.

    A second copy on the same device would share nothing out.
    """
    copies = np.ones(len(loads), np.int32)
    for _ in range(min(num_slots, len(loads) * num_devices) - len(loads)):
        copies[np.argmax(np.where(copies < num_devices, loads / copies, -1.0))] += 1
    return copies


def _filled(devices: list[set[int]], each: NDArray[np.float64], copies: Ints, room: int) -> list[set[int]]:
    """Returns the experts of each device, at most `room`, after the copies that are missing have come to `devices`.

    The busiest copies come first, each to the device that has least to do. A copy is left out where all devices with
    room have one of the same expert already.
    """
    devices = [*map(set, devices)]
    busy = [sum(each[expert] for expert in own) for own in devices]
    for expert in np.argsort(-each, kind="stable").tolist():
        for _ in range(copies[expert] - sum(expert in own for own in devices)):
            free = [d for d, own in enumerate(devices) if len(own) < room and expert not in own]
            if free:
                device = min(free, key=lambda d: (busy[d], len(devices[d])))
                devices[device].add(expert)
                busy[device] += each[expert]
    return devices


def _changed(held: Ints, each: NDArray[np.float64], copies: Ints, room: int) -> list[set[int]]:
    """Returns the experts of each device after few changes of those in `held`.

    Copies that are too many leave the busiest devices, and those that are missing come. Then an expert of the busiest
    device is exchanged with another one, time after time, as long as that helps.
    """
    devices = [set(own[own != NOTHING].tolist()) for own in held.reshape(-1, room)]
    for expert, count in enumerate(copies.tolist()):
        having = [own for own in devices if expert in own]
        having.sort(key=lambda own: sum(each[one] for one in own), reverse=True)
        for own in having[: max(len(having) - count, 0)]:
            own.remove(expert)
    devices = _filled(devices, each, copies, room)
    busy = np.array([sum(each[expert] for expert in own) for own in devices])
    for _ in range(len(held)):
        first = int(busy.argmax())
        pairs = [pair for other in range(len(devices)) if (pair := _best_exchange(devices, each, busy, first, other))]
        if busy[first] <= busy.mean() * NEAR or not pairs:
            break
        _, other, mine, theirs = min(pairs)
        for device, gone, new in ((first, mine, theirs), (other, theirs, mine)):
            devices[device] ^= {gone, new}
            busy[device] += each[new] - each[gone]
    return devices


def _best_exchange(
    devices: list[set[int]], each: NDArray[np.float64], busy: NDArray[np.float64], first: int, other: int
) -> tuple[float, int, int, int] | None:
    """Returns what the busier of two devices has to do after the best exchange, with `other` and the two experts.

    It returns None where no exchange helps.
    """
    mine, theirs = (sorted(devices[a] - devices[b]) for a, b in ((first, other), (other, first)))
    if not mine or not theirs:
        return None
    less = each[mine][:, None] - each[theirs]
    after = np.maximum(busy[first] - less, busy[other] + less)
    i, j = np.unravel_index(after.argmin(), after.shape)
    # A gain that is only one of rounding could go to and fro.
    return (float(after[i, j]), other, mine[i], theirs[j]) if after[i, j] < busy[first] * (1 - 1e-9) else None


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
