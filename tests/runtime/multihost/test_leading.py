"""Several processes run one engine: the first leads, the others follow; none hangs when another ends."""

import io
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from jaxvllm import LLM, EngineConfig
from jaxvllm.engine import build as engine_build
from jaxvllm.engine import multihost as engine_hosts
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.multihost import follower, leader, link
from jaxvllm.runtime.multihost.agreement import agree
from jaxvllm.runtime.multihost.calls import (
    Abandon,
    Admit,
    AdmitRare,
    Call,
    Close,
    EmptyAdapters,
    FillAdapter,
    FillSideRows,
    ForkSlots,
    Forward,
    Mask,
    Message,
    PlaceExperts,
    Read,
    ReadWeights,
    Recall,
    Recount,
    Reset,
    SampleRows,
    SampleSome,
    Step,
    TakeLoads,
    read_message,
    to_bytes,
)
from jaxvllm.runtime.multihost.follower import Follower
from jaxvllm.runtime.multihost.leader import Leader
from jaxvllm.runtime.multihost.shared_reader import SharedReader
from sharding.hosts import Hosts
from tests.runtime.multihost import hosts_program
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[3]
CALLS: tuple[Call, ...] = (
    Admit(np.arange(8 * 5, dtype=np.int32).reshape(8, 5)),
    Step(Bucket(16, 4), np.arange(-3, 37, dtype=np.int32)),
    Step(Bucket(16, 4, width=2, num_drafts=3), np.arange(11, dtype=np.int32)),
    Step(Bucket(16, 4, is_blind=True), np.arange(12, dtype=np.int32)),
    AdmitRare(np.arange(7, dtype=np.int32)),
    Recall(np.arange(9, dtype=np.int32)),
    Recount(np.arange(8, dtype=np.int32)),
    Forward(Bucket(4, 4, width=8), np.arange(5, dtype=np.int32)),
    Mask(np.arange(6, dtype=np.int32).reshape(2, 3)),
    Read(Bucket(16, 4), np.arange(8, dtype=np.int32), 0),
    Read(Bucket(16, 4), np.arange(14, dtype=np.int32).reshape(2, 7), 1),
    SampleRows(Bucket(16, 4)),
    SampleRows(Bucket(4, 4, is_split=True)),
    SampleSome(Bucket(16, 4), np.array([1, 0], np.int32), is_last=False),
    SampleSome(Bucket(16, 4), np.array([0, 1], np.int32), is_last=True),
    ForkSlots(np.arange(12, dtype=np.int32).reshape(2, 6)),
    FillSideRows(np.arange(-6, 0, dtype=np.int32).reshape(2, 3)),
    TakeLoads(),
    PlaceExperts(np.array([2, 0, -1, 1], np.int32), layer=60),
    ReadWeights.of(Path("/weights/é of a step")),
    Step(Bucket(16, 4, is_adapted=True), np.arange(12, dtype=np.int32)),
    FillAdapter(np.arange(-4, 4, dtype=np.int32)),
    EmptyAdapters(),
    Reset(),
    Close(),
)
WITH_WORDS = (
    Admit
    | AdmitRare
    | Recall
    | Recount
    | Step
    | Forward
    | Mask
    | Read
    | SampleSome
    | ForkSlots
    | FillSideRows
    | PlaceExperts
    | ReadWeights
    | FillAdapter
)


def same(one: Message | None, other: Message | None) -> bool:
    assert type(one) is type(other)
    if isinstance(one, Step | Forward) and isinstance(other, Step | Forward) and one.bucket != other.bucket:
        return False
    if isinstance(one, Read) and isinstance(other, Read) and (one.bucket, one.readout) != (other.bucket, other.readout):
        return False
    if isinstance(one, SampleSome) and isinstance(other, SampleSome) and one.is_last != other.is_last:
        return False
    if isinstance(one, PlaceExperts) and isinstance(other, PlaceExperts) and one.layer != other.layer:
        return False
    if isinstance(one, WITH_WORDS) and isinstance(other, WITH_WORDS):
        return one.packed.dtype == other.packed.dtype and np.array_equal(one.packed, other.packed)
    return one == other


def test_what_is_told_is_what_is_heard() -> None:
    wire = io.BytesIO(b"".join(map(to_bytes, (*CALLS, Abandon()))))
    assert all(same(read_message(wire), call) for call in CALLS)
    assert read_message(wire) == Abandon()
    assert read_message(wire) is None


@pytest.mark.parametrize("name", ["a", "/abc", "/weights/é of a step", "/not \udcff utf-8"])
def test_the_path_of_new_weights_is_the_same_everywhere(name: str) -> None:
    heard = read_message(io.BytesIO(to_bytes(ReadWeights.of(Path(name)))))
    assert isinstance(heard, ReadWeights) and heard.directory == Path(name)


@pytest.mark.parametrize("trouble", [None, OSError("no such directory"), MemoryError()])
def test_weights_are_read_by_all_processes_or_by_none(trouble: Exception | None) -> None:
    def read(directory: Path) -> dict[str, Any]:
        if trouble is not None:
            raise trouble
        return {"norm": directory}

    for told in ("", "process 1 of 2: it is damaged"):
        hosts = Mock(Hosts, share=lambda text, seconds, told=told: (text, told), __str__=lambda self: "process 0 of 2")
        reader = SharedReader(hosts, read)
        if trouble is None and not told:
            assert reader(Path("new")) == {"norm": Path("new")}
            continue
        why = told if trouble is None else f"process 0 of 2: {str(trouble) or 'MemoryError'}"
        with pytest.raises(ValueError, match=why):
            reader(Path("new"))


def test_half_a_call_is_none() -> None:
    whole = to_bytes(CALLS[1])
    assert all(read_message(io.BytesIO(whole[:size])) is None for size in range(len(whole)))


def test_what_is_no_message_is_an_error() -> None:
    with pytest.raises(ValueError, match="a message of kind 77"):
        read_message(io.BytesIO(struct.pack("<13I", 77, *[0] * 12)))


def test_a_stranger_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, a second apart, a greeting would take 36 s."""

    class Dribble:
        now, patience, is_closed = 0.0, 0.0, False

        def settimeout(self, seconds: float) -> None:
            self.patience = seconds

        def recv(self, size: int) -> bytes:
            self.now += min(self.patience, 1)
            if self.patience < 1:
                raise TimeoutError
            return b"x"

        def close(self) -> None:
            self.is_closed = True

    slow = Dribble()
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: slow.now))
    connection: Any = slow
    assert link.greet(connection, link.new_token()) is None
    assert slow.is_closed and slow.now == pytest.approx(link.GREETING_SECONDS, abs=0.01)


def test_the_last_lines_get_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended

    inner = io.BytesIO()
    monkeypatch.setattr(link.sys, "stdout", io.TextIOWrapper(inner))
    monkeypatch.setattr(link.os, "_exit", end)
    print("last words")
    assert not inner.getvalue()
    with pytest.raises(Ended):
        link.end_process()
    assert inner.getvalue() == b"last words\n"


def test_strangers_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    token = link.new_token()
    with link.listen() as server, socket.socket() as silent:
        address = ("localhost", server.getsockname()[1])
        silent.connect(address)
        with monkeypatch.context() as patch:
            patch.setattr(link, "GREETING_SECONDS", 0.05)
            assert link.greet(server.accept()[0], token) is None
        with link.connect(address, link.new_token(), 1):
            assert link.greet(server.accept()[0], token) is None
        with link.connect(address, token, 1):
            welcome = link.greet(server.accept()[0], token)
            assert welcome is not None and welcome[0] == 1
            welcome[1].close()


def test_strangers_that_say_nothing_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "GREETING_SECONDS", PATIENCE)
    token = link.new_token()
    with ExitStack() as stack:
        server = stack.enter_context(link.listen())
        address = ("localhost", server.getsockname()[1])
        for said in (b"", b"", token[:-1]):
            stranger = stack.enter_context(socket.create_connection(address))
            stranger.sendall(said)
        stack.enter_context(link.connect(address, token, 1))
        wires = leader._gather(server, token, Hosts(0, 2, "localhost"))
        assert list(wires) == [1]
        stack.enter_context(wires[1])


# A leader and its followers in one process: only the devices are missing.


@dataclass(frozen=True)
class FakeHosts(Hosts):
    """Hosts that share through a list, each in a thread of its own."""

    told: dict[int, str] = field(default_factory=dict)
    met: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def share(self, text: str, seconds: int = 0) -> tuple[str, ...]:
        self.told[self.index] = text
        self.met.wait(PATIENCE)
        texts = tuple(self.told[index] for index in range(self.count))
        self.met.wait(PATIENCE)  # nobody says more before all have read this
        return texts


def fake_hosts(count: int) -> list[FakeHosts]:
    told: dict[int, str] = {}
    met = threading.Barrier(count)
    return [FakeHosts(index, count, "localhost", told, met) for index in range(count)]


def in_threads(*functions: Any) -> list[Any]:
    """What the functions return or raise when they run at the same time."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=[index]) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return results


@dataclass
class FakeRunner:
    """Remembers what it was made to do."""

    made: list[Call] = field(default_factory=list)

    def make(self, call: Call) -> int:
        self.made.append(call)
        return len(self.made)


@dataclass
class Group:
    """A leader with two followers, and why processes were ended."""

    leader: Leader
    followers: list[Follower]
    ended: list[str]

    def wait_for_ends(self, count: int) -> None:
        wait_until(lambda: len(self.ended) >= count, lambda: self.ended)
        time.sleep(0.05)  # one more would be one too many
        assert len(self.ended) == count, self.ended


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    ended: list[str] = []
    for module in (leader, follower):
        monkeypatch.setattr(module, "say", ended.append)
        monkeypatch.setattr(module, "end_process", lambda: None)
    monkeypatch.setattr(link, "GRACE_SECONDS", 0.2)
    hosts = fake_hosts(3)
    first, *others = in_threads(
        lambda: Leader(hosts[0], {"model": "demo"}),
        *(lambda host=host: Follower(host, {"model": "demo"}) for host in hosts[1:]),
    )
    yield Group(first, others, ended)
    for one in others:
        one.__exit__(KeyboardInterrupt)
    first.abandon()
    first._thread.shutdown()
    wires = (*first._wires.values(), *(one._wire for one in others))
    wait_until(lambda: all(wire.fileno() < 0 for wire in wires))
    leader.atexit.unregister(first._leave)


def test_followers_make_the_calls_of_the_leader(group: Group) -> None:
    runners = [FakeRunner() for _ in range(3)]
    answers = [group.leader.call(runners[0].make, call) for call in CALLS]
    assert answers == list(range(1, len(CALLS) + 1))
    in_threads(*(lambda i=i: group.followers[i].follow(runners[i + 1]) for i in range(2)))  # type: ignore[misc]
    for runner in runners:
        assert all(same(made, call) for made, call in zip(runner.made, CALLS, strict=True))
    group.wait_for_ends(0)


class Failed:
    """What a device has not made."""

    def block_until_ready(self) -> None:
        raise MemoryError("two\nlines")


def test_a_step_that_fails_lets_the_followers_go(group: Group) -> None:
    group.leader.call(lambda call: Failed(), CALLS[1])
    wait_until(lambda: group.leader._failed)
    group.leader.call(lambda call: None, Close())  # who waits in a collective would not hear this one
    group.wait_for_ends(2)
    with pytest.raises(RuntimeError, match="start all of them again"):
        group.leader.call(lambda call: None, Reset())


def test_a_step_that_fails_ends_its_process(group: Group) -> None:
    class BadRunner(FakeRunner):
        def make(self, call: Call) -> Any:
            return Failed() if isinstance(call, Step) else None

    threading.Thread(target=group.followers[1].follow, args=[BadRunner()], daemon=True).start()
    group.leader.call(lambda call: None, CALLS[1])  # and not a word more
    group.wait_for_ends(1)
    assert group.ended == ["process 2 of 3 could not compute a step: two lines"]


def test_a_message_that_nobody_knows_ends_the_follower(group: Group) -> None:
    next(iter(group.leader._wires.values())).sendall(struct.pack("<13I", 77, *[0] * 12))
    group.wait_for_ends(2)
    assert any(" cannot follow process 0: a message of kind 77" in reason for reason in group.ended)


def test_a_call_is_told_before_it_is_made(group: Group) -> None:
    heard: list[Message] = []

    def make(call: Call) -> None:
        heard.append(group.followers[0]._calls.get(timeout=PATIENCE))

    group.leader.call(make, Reset())
    assert heard == [Reset()]


def test_a_call_that_fails_lets_the_followers_go(group: Group) -> None:
    def fail(call: Call) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        group.leader.call(fail, Reset())
    group.wait_for_ends(2)
    with pytest.raises(RuntimeError, match="start all of them again"):
        group.leader.call(fail, Reset())


def test_an_interrupted_call_is_made_all_the_same(group: Group) -> None:
    interrupted, made = threading.Event(), threading.Event()

    def make(call: Call) -> None:
        os.kill(os.getpid(), signal.SIGALRM)  # to the main thread, which waits for this call
        assert interrupted.wait(PATIENCE)
        made.set()

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            group.leader.call(make, Reset())
    finally:
        signal.signal(signal.SIGALRM, before)
        interrupted.set()
    assert made.wait(PATIENCE)
    assert group.followers[1]._calls.get(timeout=PATIENCE) == Reset()


def test_when_a_follower_ends_so_does_the_leader(group: Group) -> None:
    group.leader.call(lambda call: None, Reset())
    with pytest.raises(OSError), group.followers[1]:
        raise OSError
    group.wait_for_ends(1)
    assert group.ended == ["process 2 of 3 has ended, and process 0 of 3 cannot go on: see its log"]


def test_when_the_leader_dies_so_do_the_followers(group: Group) -> None:
    for wire in group.leader._wires.values():
        wire.shutdown(socket.SHUT_RDWR)
    group.leader._closed = True
    group.wait_for_ends(2)
    assert sorted(group.ended)[0] == "process 0 of 3 has ended, and process 1 of 3 cannot go on: see its log"


def test_without_an_engine_the_followers_end(group: Group) -> None:
    group.leader.abandon()
    group.wait_for_ends(2)


def test_an_error_of_all_is_left_to_each(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    has_told = threading.Event()
    monkeypatch.setattr(leader, "grace", lambda: has_told.wait(PATIENCE))  # that the leader has for an error of its own
    for one in group.followers:
        with pytest.raises(ValueError), one:
            raise ValueError
    for left in group.leader._left:
        left.wait(PATIENCE)
    group.leader.abandon()
    has_told.set()
    group.wait_for_ends(0)


def test_what_differs_is_an_error_everywhere() -> None:
    first, second = fake_hosts(2)
    errors = in_threads(lambda: agree(first, {"page_size": 16}, "offer"), lambda: agree(second, {"page_size": 32}))
    for error in errors:
        assert type(error) is ValueError
        assert str(error).startswith("page_size is 16 in process 0 and 32 in process 1: start all processes with")


def test_no_way_to_the_leader_is_an_error_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("localhost", 0))  # and does not listen
        monkeypatch.setattr(follower, "connect", lambda _, *others: link.connect(closed.getsockname(), *others))
        first, second = fake_hosts(2)
        errors = in_threads(lambda: Leader(first, {}), lambda: Follower(second, {}))
        port = closed.getsockname()[1]
    for error in errors:
        assert type(error) is ConnectionError
        assert str(error).startswith(f"process 1 cannot reach process 0 at 127.0.0.1, port {port} (")
        assert "open all ports between the hosts" in str(error)


def test_all_meet_when_their_runners_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Recorder(Hosts):
        def meet(self) -> None:
            order.append("meet")

    def runner(*_: Any, **__: Any) -> Mock:
        order.append("runner")
        return Mock()

    monkeypatch.setattr(engine_build, "Runner", runner)
    engine_build.build(EngineConfig(**hosts_program.options("1x1")), Recorder())
    assert order == ["runner", "meet"]


def test_all_processes_take_the_least() -> None:
    first, second = fake_hosts(2)
    assert in_threads(lambda: first.least(7), lambda: second.least(5)) == [5, 5]
    assert Hosts().least(9) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(coordinator="host"), "coordinator must be HOST:PORT, not 'host'"),
        (dict(num_processes=0), "num_processes must be an integer from 1 to 10000000, not 0"),
        (dict(num_processes=2, process_id=2), "process_id must be from 0 to below num_processes, not 2"),
        (dict(process_id=-1), "not -1"),
        (dict(process_id="1"), "not '1'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_several_processes_share_one_replica_or_replicas_that_share_experts() -> None:
    message = "mesh 2x4 has 2 replicas.* use 1x4 and start as many groups of processes, or enable_expert_parallel"
    with pytest.raises(NotImplementedError, match=message):
        LLM(mesh="2x4", multihost=True)


def test_processes_may_answer_at_different_rates() -> None:
    """`serve` sets the rate of process 0, by the cores of its host, and those that follow it answer nobody."""
    rates = [EngineConfig(max_outputs_per_second=rate) for rate in (None, 1000)]
    assert engine_hosts._facts(rates[0]) == engine_hosts._facts(rates[1])


def test_alone_nobody_follows() -> None:
    assert not engine_hosts.follow()
    assert engine_hosts._hosts(EngineConfig()) == Hosts()
