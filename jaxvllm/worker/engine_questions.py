"""Commands that an engine's process was sent beside requests, and whose answers are still to come."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxvllm.engine.commands import AnyCommand
from jaxvllm.worker import wire
from jaxvllm.worker.engine_client import EngineDiedError, EngineUnavailableError
from jaxvllm.worker.engine_process import EngineProcess

logger = logging.getLogger(__name__)

# The errors that the kinds of `wire.CommandAnswer` stand for.
_ERRORS: Mapping[wire.AnswerKind, type[Exception]] = {
    "wrong": ValueError,
    "unsupported": NotImplementedError,
    "unavailable": EngineUnavailableError,
    "died": EngineDiedError,
}
COMMAND_ERRORS = tuple(_ERRORS.values())


def failed(number: int, error: Exception) -> wire.CommandAnswer:
    """Returns the answer to a command that raised one of `COMMAND_ERRORS`."""
    kind = next(kind for kind, one in _ERRORS.items() if isinstance(error, one))
    return wire.CommandAnswer(number, reason=str(error), kind=kind)


class EngineQuestions:
    """Sends commands to the process of an engine, and gives their answers to those who wait for them."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[AnyCommand, asyncio.Future[Any]]] = {}  # by number
        self._num_asked = 0
        # The latest of each kind of command that lasts. A process that is started again gets them.
        self.lasting: dict[str, AnyCommand] = {}

    @property
    def take_long(self) -> bool:
        """Whether the engine may be silent for long, because of what it was asked to do."""
        return any(command.takes_long for command, _ in self._open.values())

    def ask(self, process: EngineProcess, command: AnyCommand) -> asyncio.Future[Any]:
        """Sends a command, and returns the answer to come."""
        self._num_asked += 1
        process.send(wire.Ask(self._num_asked, command))
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[self._num_asked] = command, answered
        return answered

    def repeat(self, process: EngineProcess) -> None:
        """Tells a new process what the one before it was told that lasts. If that fails, it is killed."""

        def done(answered: asyncio.Future[Any]) -> None:
            if not answered.cancelled() and (error := answered.exception()) is not None:
                logger.error("the engine is killed, since it could not do again what it was told: %s", error)
                process.kill()

        for command in self.lasting.values():
            self.ask(process, command).add_done_callback(done)

    def remember(self, command: AnyCommand) -> None:
        """Has a process that is started again told this, if the command lasts."""
        if command.lasts:
            self.lasting.pop(type(command).__name__, None)  # so that they come in the order in which they were done
            self.lasting[type(command).__name__] = command

    def remembers(self, command: AnyCommand) -> bool:
        """Returns whether this very command is what a process that is started again is told."""
        return self.lasting.get(type(command).__name__) is command

    def answer(self, answer: wire.CommandAnswer) -> None:
        """Gives an answer to the caller who waits for it, unless the caller has left.

        What the engine has done lasts all the same.
        """
        command, answered = self._open.pop(answer.number, (None, None))
        if command is None or answered is None:
            return
        if answer.kind is None:
            self.remember(command)
        if answered.done():
            return
        if answer.kind is not None:
            answered.set_exception(_ERRORS[answer.kind](answer.reason))
        else:
            answered.set_result(msgspec.msgpack.decode(answer.answer, type=command.answers))

    def fail(self, error: RuntimeError) -> None:
        """Fails all that was asked, because the engine has ended."""
        for _, answered in self._open.values():
            if not answered.done():
                answered.set_exception(error)
                answered.exception()  # marks it as seen: the caller may have left
        self._open.clear()
