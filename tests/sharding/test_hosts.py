"""How the processes of one engine find each other, and how they wait."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import pytest
from jax._src.distributed import State, initialize

from sharding import hosts as sharding_hosts
from sharding.hosts import Hosts, join


@dataclass
class FakeClient:
    """The store of jax's coordination service, in which a wait ends early: as `errors` say."""

    errors: list[str]
    values: dict[str, str] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)

    def key_value_increment(self, key: str, by: int) -> int:
        return by

    def key_value_set(self, key: str, value: str) -> None:
        self.values |= {f"{key[:-1]}{index}": value for index in range(2)}  # process 1 says the same

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        self.waits.append(milliseconds)
        if self.errors:
            raise jax.errors.JaxRuntimeError(self.errors.pop())
        return self.values[key]


@pytest.mark.parametrize(
    ("errors", "seconds", "error"),
    [
        (["DEADLINE_EXCEEDED: none yet"] * 3, 60, None),
        (["DEADLINE_EXCEEDED: none yet"] * 3, -1, "process 0 of 2 waited -1 s for process 0: see its log"),
        (["UNAVAILABLE: gone"], 60, "UNAVAILABLE: gone"),
    ],
    ids=["late", "too late", "gone"],
)
def test_a_wait_is_in_slices(
    errors: list[str], seconds: int, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient(list(errors))
    monkeypatch.setattr(sharding_hosts.global_state, "client", client)
    if error is None:
        assert Hosts(0, 2).share("hello", seconds) == ("hello", "hello")
    else:
        with pytest.raises((TimeoutError, jax.errors.JaxRuntimeError), match=error):
            Hosts(0, 2).share("hello", seconds)
    assert max(client.waits) <= 1000  # Ctrl-C is heard between them


# Joining.


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments that jax was given; the environment names nobody."""
    for name in list(os.environ):
        if name.startswith(("JAX_COORDINATOR", "JAX_PROCESS", "JAX_NUM_PROC", "SLURM_", "OMPI_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    before = jax.config.jax_enable_recoverability, jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]
    yield calls
    jax.config.update("jax_enable_recoverability", before[0])
    jax.config.update("jax_enable_preemption_service", before[1])


def test_joins_by_flags_before_the_environment(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    join()
    join("host:1", 2, 0)
    join(process_id=1)
    assert joined == [(None, 4, 3), ("host:1", 2, 0), (None, 4, 1)]


def test_what_the_environment_leaves_open_is_jaxs_to_find(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    join()
    assert joined == [(None, None, None)]
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID must be a whole number, not 'one'"):
        join()


def test_nobody_to_join_is_an_error(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "initialize", State().initialize)  # jax itself, which finds nobody here
    with pytest.raises(ValueError, match="give --coordinator, --num-processes and --process-id, or set JAX_COORD"):
        join()


def test_after_jaxs_first_use_it_is_too_late(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match=r"could not join others: .*must be called before any JAX calls.*[^\n]*$"):
        join("localhost:1", 2, 0)
