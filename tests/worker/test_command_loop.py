"""The engine's side of the socket, with an engine and a socket that do what the test says."""

import gc
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import example, given

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import OverloadedError, ParameterError, UnsupportedParameterError
from jaxvllm.core.pause import PauseMode
from jaxvllm.core.pooler import Pooler
from jaxvllm.core.request import GenerationRequest, Prompt
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.weight_version import WeightVersionSpan
from jaxvllm.engine.commands import (
    AbortRequests,
    CheckSleep,
    EngineRest,
    NameWeights,
    PutToSleep,
    ReleaseKV,
    ResetPrefixCache,
    SetPause,
    ShowExpertLoads,
    ShowPages,
    ShowRest,
    ShowWeightVersions,
    UpdateWeights,
    WakeUp,
)
from jaxvllm.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxvllm.engine.page_view import PageState, PageView, PoolView
from jaxvllm.engine.stats import EngineStats, StepReport
from jaxvllm.worker import command_loop, wire
from jaxvllm.worker.command_loop import MAX_BREAKS, CommandLoop
from jaxvllm.worker.preparing import Preparing
from jaxvllm.worker.queue_limits import QueueLimits

STATS = EngineStats(*range(20))


class Socket:
    """Brings the commands, then raises `Empty` where a real one would wait."""

    def __init__(self, *commands: wire.Command | bytes):
        self.commands = deque(commands)
        self.said: list[wire.Report] = []

    def recv(self, flags: int = 0) -> bytes:
        if self.commands:
            command = self.commands.popleft()
            return command if isinstance(command, bytes) else wire.encode(command)
        if flags & zmq.NOBLOCK:
            raise zmq.Again
        raise EOFError

    def poll(self, milliseconds: int) -> bool:
        return bool(self.commands)

    def send(self, data: bytes) -> None:
        self.said.append(wire.decode_report(data))


def engine(**methods: Any) -> Any:
    scheduler = SimpleNamespace(
        num_waiting=0,
        num_running=0,
        num_waiting_tokens=0,
        slots=SimpleNamespace(num_slots=2),
        cache=SimpleNamespace(num_pages=8, page_size=16),
    )
    base = dict(
        has_work=False,
        is_closed=False,
        replicas=[SimpleNamespace(scheduler=scheduler)],
        tokenizer_directory=None,
        vocab_size=10,
        max_model_len=64,
        eos_token_ids=(2,),
        pooler=Pooler("LAST", 4),
        side_inputs=None,
        defaults=SimpleNamespace(params=SamplingParams(), max_tokens=None, most_tokens=None),
        stats=lambda: STATS,
        is_broken=False,
        take_reports=list,
        outputs=SimpleNamespace(take_started=list),
        prepare=lambda request: None,
        use_pause=lambda: None,
    )
    made = SimpleNamespace(**base | methods)
    made.inputs = made  # it checks requests itself
    return made


def asked(request_id: str, **params: Any) -> GenerationRequest:
    return GenerationRequest(request_id, Prompt(None, np.array([1, 2], np.int32)), SamplingParams(**params))


ASKED = asked("a")


def run(engine: Any, *commands: wire.Command | bytes) -> list[wire.Report]:
    socket = Socket(*commands)
    loop = CommandLoop(engine, QueueLimits(), socket)  # type: ignore[arg-type]
    with pytest.raises((EOFError, OverflowError)):
        loop.run()
    assert isinstance(socket.said[0], wire.Ready)
    return socket.said[1:]


def test_what_the_engine_is_made_of_is_not_collected_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection takes 0.1 s of every request, and what is alive when the engine is built stays alive."""
    frozen: list[int] = []

    class Loop:
        def __init__(self, *args: Any) -> None:
            pass

        def run(self) -> None:
            frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(command_loop, "Engine", lambda *args: object())
    monkeypatch.setattr(command_loop, "CommandLoop", Loop)
    gc.unfreeze()  # what conftest.py has frozen
    with zmq.Context() as context, context.socket(zmq.PAIR) as client:
        port = client.bind_to_random_port("tcp://127.0.0.1")
        server = threading.Thread(target=command_loop.serve, args=[f"tcp://127.0.0.1:{port}"])
        server.start()
        client.send(wire.encode(wire.Start(EngineConfig(model="demo"), QueueLimits())))
        server.join()
    gc.freeze()
    [count] = frozen
    assert count > 10_000


def test_an_engine_uses_its_first_pause_and_no_time_in_which_requests_run() -> None:
    """What it builds there holds the GIL, so no request would get a token for a second."""
    has_work, left = [True, True, False], list[int]()

    def step() -> list[Any]:
        loop.has_work = has_work.pop(0)
        return []

    loop = engine(has_work=True, step=step, use_pause=lambda: left.append(len(has_work)))
    run(loop)
    assert left == [0]


def test_a_broken_step_is_told_and_the_engine_goes_on() -> None:
    steps = 0

    def step() -> list[Any]:
        nonlocal steps
        steps += 1
        if steps == 1:
            raise ZeroDivisionError("a path /home/x")
        loop.has_work = False
        return []

    loop = engine(has_work=True, step=step)
    said = run(loop, wire.Ping())
    assert [type(report) for report in said][:2] == [wire.Pulse, wire.Broken]
    assert said[1] == wire.Broken("ZeroDivisionError")
    assert steps == 2


def test_a_pulse_tells_which_requests_have_had_their_first_token() -> None:
    outputs = SimpleNamespace(take_started=lambda: ["b", "ended", "a"])
    loop = engine(outputs=outputs, submit=lambda *args: None, check_fits=lambda request: None)
    said = run(loop, *(wire.Add(serial, asked(name)) for serial, name in ((7, "a"), (8, "b"), (9, "c"))), wire.Ping())
    assert [report.started for report in said if isinstance(report, wire.Pulse)] == [[8, 7]]


def test_an_engine_that_cannot_step_is_given_up() -> None:
    def step() -> list[Any]:
        raise OverflowError

    said = run(engine(has_work=True, step=step))
    broken = [report for report in said if isinstance(report, wire.Broken)]
    assert broken == [wire.Broken("OverflowError")] * MAX_BREAKS


def test_steps_that_fail_when_they_are_read_are_failures_in_a_row() -> None:
    """After a reset the first step is only launched: that it raises nothing says nothing."""
    calls = 0

    def step() -> list[Any]:
        nonlocal calls
        calls += 1
        if calls % 2:
            return []
        raise OverflowError

    said = run(engine(has_work=True, step=step))
    assert len([report for report in said if isinstance(report, wire.Broken)]) == MAX_BREAKS


def test_what_the_engine_refuses_is_rejected() -> None:
    def check(*_: Any) -> None:
        raise ValueError("too long")

    add = wire.Add(7, asked("a"))
    assert run(engine(check_fits=check), add) == [wire.Rejected(7, "too long", False)]


def test_a_grammar_compiles_while_others_run_and_the_wrong_one_is_rejected() -> None:
    grammars: dict[str, Future[Any]] = {name: Future() for name in ("good", "wrong", "left")}
    submitted: list[str] = []

    def submit(request: GenerationRequest, prepared: Future[Any] | None) -> None:
        assert prepared is grammars.get(request.request_id), "it would be compiled again if it was forgotten meanwhile"
        if prepared is not None:
            prepared.result()
        submitted.append(request.request_id)

    def step() -> list[Any]:
        # While a request runs, the grammars get ready, and their order is not that in which they came.
        if grammars["good"].done():
            loop.has_work = False
            return []
        assert submitted == ["free"]
        grammars["wrong"].set_exception(ParameterError("no grammar", "structured_outputs"))
        grammars["good"].set_result(SimpleNamespace(warnings=("not enforced",)))
        return []

    loop = engine(
        has_work=True,
        step=step,
        check_fits=lambda request: None,
        prepare=lambda request: grammars.get(request.request_id),
        submit=submit,
        abort=lambda request_id: None,
    )
    adds = [wire.Add(serial, asked(name)) for serial, name in enumerate((*grammars, "free"))]
    said = run(loop, *adds, wire.Abort(["left"]))
    assert said[0] == wire.Accepted(3), "it waits for nobody"
    assert said[1] == wire.Rejected(2, "the request was aborted", False)
    assert [report for report in said if isinstance(report, wire.Rejected | wire.Accepted)][2:] == [
        wire.Accepted(0, ["not enforced"]),
        wire.Rejected(1, "no grammar", False, "structured_outputs"),
    ]
    assert submitted == ["free", "good"]


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_ends_requests_whose_grammars_still_compile(mode: PauseMode) -> None:
    """Their callers hear of it as all others do, and none of them waits for the end of the pause."""
    ended: list[str] = []

    def end(request: GenerationRequest) -> None:
        ended.append(request.request_id)
        if request.request_id == "twice":
            raise ParameterError("in use", "request_id")

    def step() -> list[RequestOutput]:
        if not ended:
            raise EOFError
        ended.clear()
        aborted = CompletionOutput(0, "", [], finish_reason="abort")
        return [RequestOutput("a", None, [1, 2], [aborted], True, RequestMetrics(1.0))]

    loop = engine(prepare=lambda request: Future(), end=end, step=step, pause=lambda mode: None, has_work=True)
    said = run(loop, wire.Add(7, asked("a")), wire.Add(8, asked("twice")), wire.Ask(1, SetPause(mode)))
    of_requests = [report for report in said if isinstance(report, wire.Accepted | wire.Rejected | wire.Outputs)]
    if mode == "keep":
        assert of_requests == []
        return
    accepted, rejected, outputs = of_requests
    assert accepted == wire.Accepted(7)
    assert rejected == wire.Rejected(8, "in use", False, "request_id")
    assert isinstance(outputs, wire.Outputs)
    assert [(output.serial, output.completions[0].finish_reason) for output in outputs.outputs] == [(7, "abort")]


def test_grammars_that_nothing_waits_for_block_no_thread() -> None:
    """An engine that always has work never reads the pipe."""
    preparing = Preparing()
    grammar: Future[Any] = Future()
    grammar.set_result(None)
    for serial in range(2**16 + 1):  # what a pipe holds, and one more
        preparing.add(wire.Add(serial, ASKED), grammar)
    assert [add.serial for add, _ in preparing.take_ready()] == [2**16]


def test_an_idle_engine_waits_for_a_grammar_or_a_message() -> None:
    preparing = Preparing()
    grammar: Future[Any] = Future()
    add = wire.Add(1, asked("a"))
    with zmq.Context() as context, context.socket(zmq.PAIR) as mine, context.socket(zmq.PAIR) as other:
        mine.bind("inproc://preparing")
        other.connect("inproc://preparing")
        preparing.add(add, grammar)
        other.send(b"message")
        preparing.wait(mine)
        assert mine.recv() == b"message" and preparing and not preparing.take_ready()
        thread = threading.Thread(target=grammar.set_result, args=(None,))
        thread.start()
        preparing.wait(mine)
        thread.join()
        assert preparing.take_ready() == [(add, grammar)] and not preparing


def test_a_rejection_names_the_parameter() -> None:
    def check(*_: Any) -> None:
        raise ParameterError("too many", "stop_token_ids")

    add = wire.Add(7, asked("a"))
    assert run(engine(check_fits=check), add) == [wire.Rejected(7, "too many", False, "stop_token_ids")]


def test_a_reset_of_the_prefix_cache_is_answered_when_it_is_done() -> None:
    resets = []
    asked = wire.Ask(7, ResetPrefixCache(True, False)), wire.Ask(8, ResetPrefixCache(False, True))
    said = run(engine(reset_prefix_cache=lambda *what: resets.append(what) or True), *asked)
    assert (said, resets) == (
        [wire.CommandAnswer.of(7, True), wire.CommandAnswer.of(8, True)],
        [(True, False), (False, True)],
    )


@pytest.mark.parametrize(("error", "kind"), [(ValueError("why"), "wrong"), (NotImplementedError("why"), "unsupported")])
def test_a_command_that_cannot_be_done_is_answered_with_the_reason(error: Exception, kind: Any) -> None:
    def fail(*of_update: Any) -> None:
        raise error

    said = run(engine(update_weights=fail), wire.Ask(7, UpdateWeights("there")))
    assert said == [wire.CommandAnswer(7, reason="why", kind=kind)]


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_command_that_fails_does_not_end_the_engine(is_reset: bool) -> None:
    def fail(*of_update: Any) -> None:
        if is_reset:
            loop.outputs = SimpleNamespace(take_started=list)
        raise MemoryError

    loop = engine(update_weights=fail)
    said = run(loop, wire.Ask(7, UpdateWeights("there")), wire.Ping())
    reason = "UpdateWeights failed in the engine (MemoryError)"
    assert said[-2] == wire.CommandAnswer(7, reason=reason, kind="died")
    assert said[:-2] == ([wire.Broken("MemoryError")] if is_reset else [])


def test_scores_of_a_prompt_are_sent_once() -> None:
    scores: list[dict[int, Logprob] | None] = [None, {2: Logprob(-1.0, 3, "b")}]
    outputs = deque(
        RequestOutput("a", None, [1, 2], [], finished, RequestMetrics(1.0), 0, scores)
        for finished in (False, False, True)
    )

    def step() -> list[RequestOutput]:
        loop.has_work = len(outputs) > 1
        return [outputs.popleft()]

    def submit(*_: Any) -> None:
        loop.has_work = True

    loop = engine(check_fits=lambda *_: None, submit=submit, step=step)
    said = run(loop, wire.Add(7, asked("a", prompt_logprobs=1)))
    sent = [output for report in said if isinstance(report, wire.Outputs) for output in report.outputs]
    assert [output.prompt_logprobs for output in sent] == [scores, None, None]


def test_limits_count_what_would_wait() -> None:
    def scheduler(waiting: int, running: int, tokens: int) -> Any:
        slots = SimpleNamespace(num_slots=4)
        return SimpleNamespace(num_waiting=waiting, num_running=running, num_waiting_tokens=tokens, slots=slots)

    limits = QueueLimits(num_requests=2, num_tokens=100)
    limits.check([scheduler(0, 0, 0)], 4, 1000)  # none of them waits
    limits.check([scheduler(0, 4, 0)], 2, 100)
    with pytest.raises(OverloadedError, match="2 requests wait already"):
        limits.check([scheduler(2, 4, 20)], 1, 10)
    with pytest.raises(OverloadedError, match="prompts of 101 tokens would wait, and the most is 100"):
        limits.check([scheduler(1, 4, 91)], 1, 10)
    limits.check([scheduler(2, 4, 20), scheduler(0, 3, 0)], 1, 10)  # the other replica has a slot
    QueueLimits().check([scheduler(10**6, 4, 10**9)], 10**6, 10**9)


PAGE = PageView(page=3, first_position=16, token_ids=(1, 2), num_owners=2, findable=True)
LOGPROBS = [{1: Logprob(-0.5, 1, "a"), 2: Logprob(-9.0)}]
SPANS = [WeightVersionSpan("seven", 0, 1)]
OUTPUT = CompletionOutput(0, "a", [1], -0.5, LOGPROBS, "stop", "x", [("a", True)], weight_versions=SPANS)


@pytest.mark.parametrize(
    "message",
    [
        wire.Start(EngineConfig(token_buckets=(16, 32), mesh="2x4"), QueueLimits(1, None)),
        wire.Add(
            2**40,
            GenerationRequest(
                "id",
                Prompt("a", np.array([1, 2, 2**31 - 1], np.int32), "salt"),
                SamplingParams(stop=("a",), seed=-(2**63), logprobs=3, max_tokens=None),
                -5,
            ),
        ),
        wire.Abort(["a", "b"]),
        wire.Ping(),
        wire.Ask(3, ShowPages()),
        wire.Ask(3, ShowExpertLoads()),
        wire.Ask(4, ResetPrefixCache(False, True)),
        wire.Ask(5, UpdateWeights("there", "seven", "keep")),
        wire.Ask(5, ShowWeightVersions()),
        wire.Ask(6, SetPause("keep")),
        wire.Ask(6, SetPause(None)),
        wire.Ask(7, CheckSleep(1)),
        wire.Ask(7, PutToSleep(2)),
        wire.Ask(7, ReleaseKV()),
        wire.Ask(7, NameWeights("step-1")),
        wire.Ask(7, AbortRequests(frozenset({"a"}))),
        wire.Ask(7, AbortRequests(None)),
        wire.Ask(8, WakeUp(("weights",))),
        wire.Ask(9, ShowRest()),
        wire.Stop(),
        wire.Accepted(7),
        wire.FollowerEnded(),
        wire.Rejected(7, "why", True),
        wire.Rejected(7, "why", False, "stop"),
        wire.CommandAnswer(3, reason="why", kind="died"),
        wire.Failed("why", False),
        wire.Broken("X"),
        wire.Outputs([wire.Output(7, [OUTPUT], True, RequestMetrics(1.0, 2.0), 16, [None, {2: Logprob(-1.0)}])]),
        wire.Pulse(STATS, [StepReport(0, 1, 2, 3, 1, 0, 16, 0.1, 0.2, 0.05, True)]),
        wire.CommandAnswer.of(3, [PoolView(16, (PageState.TRASH, PageState.OWNED), {"a": (PAGE,)})]),
        wire.Ready(wire.EngineFacts(None, 10, 64, (2, 3), SamplingParams(), 1, 8, 16, 2)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_message_arrives_as_it_was_sent(message: wire.Command | wire.Report) -> None:
    decode = wire.decode_command if isinstance(message, wire.Command.__value__) else wire.decode_report
    assert decode(wire.encode(message)) == message


def test_several_engines_are_paused_when_all_are_and_asleep_when_one_is() -> None:
    rests = [EngineRest(True, False, ("weights",)), EngineRest(True, True, ("weights", "kv_cache"))]
    assert ShowRest().joined(rests) == EngineRest(True, False, ("weights", "kv_cache"))
    answer = wire.CommandAnswer.of(3, rests[0])
    assert msgspec.msgpack.decode(answer.answer, type=ShowRest.answers) == rests[0]


def test_the_id_of_an_answer_ends_all_that_the_server_has_made_of_it() -> None:
    """A client may choose an id that looks like a part of another answer."""
    asked = {
        answer_id: [
            GenerationRequest(name, Prompt(None, (1,)), SamplingParams(), answer_id=answer_id)
            for name in (answer_id, f"{answer_id}-0", f"{answer_id}-0123456789abcdef-12")
        ]
        for answer_id in ("cmpl-a", "b", "b-3", "cmpl-a-0123456789abcdef", "cmpl", "c")
    }
    aborts = AbortRequests(frozenset({"cmpl-a", "b"}))
    ended = [one for requests in asked.values() for one in requests if aborts.ends(one)]
    assert ended == [*asked["cmpl-a"], *asked["b"]]
    alone = GenerationRequest("b", Prompt(None, (1,)), SamplingParams())
    assert aborts.ends(alone) and not aborts.ends(replace(alone, request_id="b-3"))
    assert AbortRequests(None).ends(alone) and aborts.joined([2, 1]) == 3
    assert not AbortRequests(frozenset()).ends(alone)


def test_loads_of_experts_arrive_and_those_of_several_engines_are_added() -> None:
    engine: Any = SimpleNamespace(expert_loads=lambda: {1: np.array([2**40, 3]), 12: np.array([0, 5])})
    command = ShowExpertLoads()
    answer = wire.decode_report(wire.encode(wire.CommandAnswer.of(3, command.run(engine))))
    assert isinstance(answer, wire.CommandAnswer)
    loads = msgspec.msgpack.decode(answer.answer, type=command.answers)
    assert command.joined([loads, loads]) == {1: [2**41, 6], 12: [0, 10]}


@given(st.binary(max_size=200))
@example(b"\x91\xa1\x80")  # a class whose name is no text
def test_anything_else_is_no_message(data: bytes) -> None:
    try:
        wire.decode_command(data)
    except msgspec.DecodeError:
        return
    assert wire.encode(wire.decode_command(data))


def undecodable(serial: int) -> bytes:
    """An `Add` whose request has a priority that is no number."""
    return msgspec.msgpack.encode(["Add", serial, {"request_id": "x", "priority": "high"}])


@pytest.mark.parametrize("error", [TypeError("a path /home/x"), MemoryError(), RuntimeError()])
@pytest.mark.parametrize("at", ["prepare", "check_fits", "submit"])
def test_a_request_at_which_something_fails_is_lost_alone(at: str, error: Exception) -> None:
    def fail(request: GenerationRequest, *_: Any) -> None:
        if request.request_id == "a":
            raise error

    calm = dict(prepare=fail, check_fits=fail, submit=fail)
    others = {name: (lambda *_: None) for name in calm if name != at}
    said = run(engine(**calm | others), wire.Add(7, asked("a")), wire.Add(8, asked("b")))
    name = type(error).__name__
    assert said == [wire.Lost(7, f"this request could not be queued ({name})"), wire.Accepted(8)]


def test_what_the_engine_does_not_support_is_rejected() -> None:
    def submit(*_: Any) -> None:
        raise UnsupportedParameterError("not on this backend", "logprobs")

    said = run(engine(check_fits=lambda _: None, submit=submit), wire.Add(7, asked("a")))
    assert said == [wire.Rejected(7, "not on this backend", False, "logprobs")]


def test_a_request_that_cannot_be_decoded_is_lost_alone() -> None:
    loop = engine(check_fits=lambda _: None, submit=lambda *_: None)
    said = run(loop, undecodable(7), wire.Add(8, asked("b")))
    assert said == [wire.Lost(7, "this request could not be decoded (ValidationError)"), wire.Accepted(8)]
    assert [wire.serial_of_add(data) for data in (undecodable(9), wire.encode(wire.Add(3, asked("a"))))] == [9, 3]
    assert [wire.serial_of_add(data) for data in (wire.encode(wire.Ping()), b"", b"\x91\xa1\x80")] == [None] * 3


def test_an_output_that_cannot_be_sent_is_the_end_of_its_request_alone() -> None:
    aborted: list[str] = []

    def step() -> list[RequestOutput]:
        loop.has_work = False
        texts = {"a": "half a character: \ud800", "b": "fine"}
        return [
            RequestOutput(name, None, [1, 2], [CompletionOutput(0, text, [1])], name == "b", RequestMetrics(1.0))
            for name, text in texts.items()
        ]

    def submit(*_: Any) -> None:
        loop.has_work = True

    loop = engine(check_fits=lambda _: None, submit=submit, step=step, abort=aborted.append)
    said = run(loop, wire.Add(7, asked("a")), wire.Add(8, asked("b")))
    lost = wire.Lost(7, "this request has an output that could not be sent (UnicodeEncodeError)")
    assert lost in said and aborted == ["a"]
    [output] = [output for report in said if isinstance(report, wire.Outputs) for output in report.outputs]
    assert (output.serial, output.completions[0].text) == (8, "fine")


def test_the_last_output_of_a_request_that_was_aborted_is_told_to_nobody() -> None:
    def step() -> list[RequestOutput]:
        loop.has_work = False
        ends = [CompletionOutput(0, "fine", [1])]
        return [RequestOutput(name, None, [1, 2], ends, True, RequestMetrics(1.0)) for name in "ab"]

    def abort(_: str) -> None:
        loop.has_work = True

    loop = engine(check_fits=lambda _: None, submit=lambda *_: None, step=step, abort=abort)
    said = run(loop, wire.Add(7, asked("a")), wire.Add(8, asked("b")), wire.Abort(["a"]))
    assert [output.serial for report in said if isinstance(report, wire.Outputs) for output in report.outputs] == [8]


def test_an_abort_that_breaks_off_ends_all_requests_and_not_the_engine() -> None:
    def abort(_: str) -> None:
        raise KeyError("a")

    said = run(engine(abort=abort, check_fits=lambda _: None, submit=lambda *_: None), wire.Abort(["a"]), wire.Ping())
    assert [type(report) for report in said] == [wire.Broken, wire.Pulse]


def test_an_engine_that_cannot_be_reset_is_given_up_by_the_next_request() -> None:
    def submit(*_: Any) -> None:
        raise OverflowError

    assert run(engine(is_broken=True, check_fits=lambda _: None, submit=submit), wire.Add(7, asked("a"))) == []
