"""An engine in its own process: does what the client says, and steps while there is work."""

import logging
import time
from dataclasses import replace

import zmq

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine import wire
from jaxvllm.engine.admission import OverloadedError, QueueLimits
from jaxvllm.engine.engine import Engine
from jaxvllm.engine.hosts import follow_config
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.page_view import PoolView

logger = logging.getLogger("jaxvllm.engine")

# Counters go out this often while there is work, and when they are asked for.
PULSE_SECONDS = 0.5
# Steps that break off in a row before the engine is given up. After one, host and device are made as new.
MAX_BREAKS = 3
# For the last words to get out. It is over as soon as they are out, or the client is gone.
LINGER_MILLISECONDS = 10_000


def serve(address: str) -> bool:
    """Builds the engine that the first message describes, and works for the client at `address` until that says stop.

    An engine that cannot be built is told, and is the end. Of several processes, those after the first have no engine
    of their own: they follow, and tell when that has ended. Returns whether there were several.
    """
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        socket.connect(address)
        start = wire.decode_command(socket.recv())
        assert isinstance(start, wire.Start)
        try:
            if follow_config(start.config):
                socket.send(wire.encode(wire.Followed()))
                return True
            engine = Engine(start.config)
        except (ValueError, NotImplementedError, OSError, ImportError, MemoryError, RuntimeError) as error:
            logger.debug("the engine could not be built", exc_info=True)
            usage = isinstance(error, ValueError | NotImplementedError | OSError)
            socket.send(wire.encode(wire.Failed(" ".join(str(error).split()) or type(error).__name__, usage)))
        else:
            CommandLoop(engine, start.limits, socket).run()
        return start.config.has_others


class CommandLoop:
    """Does what the client says, and steps the engine while it has work."""

    def __init__(self, engine: Engine, limits: QueueLimits, socket: "zmq.Socket[bytes]"):
        self._engine = engine
        self._limits = limits
        self._socket = socket
        self._pulse_at = 0.0
        self._breaks = 0
        self._serials: dict[str, int] = {}  # of the requests that have not ended
        self._unscored: set[int] = set()  # of them, those whose client waits for the prompt's log-probabilities

    def run(self) -> None:
        """Returns when it is told to stop. Raises what broke `MAX_BREAKS` steps in a row."""
        self._send(wire.Ready(self._facts()))
        while not self._engine.is_closed:
            self._hear()
            if self._engine.has_work and not self._engine.is_closed:
                self._step()
                if time.monotonic() >= self._pulse_at:
                    self._pulse()

    def _step(self) -> None:
        try:
            results = self._engine.step()
        except Exception as error:
            logger.exception("a step broke off: its requests have failed")
            self._serials.clear()
            self._unscored.clear()
            self._send(wire.Broken(type(error).__name__))
            self._breaks += 1
            if self._breaks == MAX_BREAKS:
                raise
            return
        if results:
            self._breaks = 0  # not earlier: a step that is only launched may fail when it is read
            self._send(wire.Outputs([self._output(result) for result in results]))

    def _hear(self) -> None:
        """Does all that has been said; waits for something when there is no other work."""
        if not self._engine.has_work:
            self._obey(self._socket.recv())
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._obey(data)

    def _obey(self, data: bytes) -> None:
        match wire.decode_command(data):
            case wire.Add() as add:
                self._add(add)
            case wire.Abort(request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
                    self._unscored.discard(self._serials.pop(request_id, -1))
            case wire.Ping():
                self._pulse()
            case wire.ShowPages():
                self._send(wire.Pages([PoolView.take(replica.scheduler) for replica in self._engine.replicas]))
            case wire.ResetPrefixCache():
                self._engine.reset_prefix_cache()
                self._send(wire.PrefixCacheReset())
            case wire.Stop():
                self._engine.close()

    def _add(self, add: wire.Add) -> None:
        prompt = {"prompt_token_ids": add.token_ids, "cache_salt": add.cache_salt}
        schedulers = [replica.scheduler for replica in self._engine.replicas]
        try:
            submission = self._engine.check(add.request_id, prompt, add.params, add.priority)
            self._limits.check(schedulers, add.params.n, add.params.n * len(add.token_ids))
            self._engine.submit(submission)
        except (ValueError, OverloadedError) as error:
            param = error.param if isinstance(error, ParameterError) else None
            self._send(wire.Rejected(add.serial, str(error), isinstance(error, OverloadedError), param))
        else:
            self._serials[add.request_id] = add.serial
            if add.params.prompt_logprobs is not None:
                self._unscored.add(add.serial)
            self._send(wire.Accepted(add.serial))

    def _output(self, result: RequestOutput) -> wire.Output:
        assert result.metrics is not None
        serial = self._serials.pop(result.request_id) if result.finished else self._serials[result.request_id]
        scores = result.prompt_logprobs if serial in self._unscored else None
        self._unscored.discard(serial)
        return wire.Output(serial, result.outputs, result.finished, result.metrics, result.num_cached_tokens, scores)

    def _pulse(self) -> None:
        self._pulse_at = time.monotonic() + PULSE_SECONDS
        self._send(wire.Pulse(self._engine.stats(), self._engine.take_reports()))

    def _send(self, report: wire.Report) -> None:
        self._socket.send(wire.encode(report))

    def _facts(self) -> wire.EngineFacts:
        engine = self._engine
        schedulers = [replica.scheduler for replica in engine.replicas]
        return wire.EngineFacts(
            tokenizer_directory=None if engine.tokenizer_directory is None else str(engine.tokenizer_directory),
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            default_params=replace(engine.default_params, output_kind=RequestOutputKind.CUMULATIVE),
            num_replicas=len(schedulers),
            num_pages=sum(scheduler.pool.num_pages - 1 for scheduler in schedulers),
            page_size=schedulers[0].pool.page_size,
            max_num_seqs=sum(scheduler.slots.num_slots for scheduler in schedulers),
        )
