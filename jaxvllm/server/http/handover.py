"""Connections that one process accepts and hands over to others, which answer them."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

from jaxvllm.server.http.listener import Listener

logger = logging.getLogger(__name__)

# The time until it is tried again where the machine has no file left for another connection.
NO_FILES_SECONDS = 1.0
# The time between two looks at whether a process answers.
LOOK_SECONDS = 0.5
# A process that owes an answer at so many looks in a row is silent, and gets no connections until it answers. It has 1
# to 1.5 s, and the check of a large body holds it up for 0.1 s.
SILENT_LOOKS = 3
# After so many it is stuck: 120 s, as for an engine.
STUCK_LOOKS = 240
# The most messages to a process that it has not answered. Some 270 find room on the way, and its answers need it, too.
MOST_UNANSWERED = 128
# Every message is one byte: that a process is ready, a connection or a heartbeat for it, and its answer to either.
BYTE = b"\0"


class Handover:
    """Accepts the connections of a listening socket, and hands them in turn to the processes that answer.

    docs/decisions/0011 says why processes do not accept themselves. Connections wait while no process answers. It needs
    a running event loop.
    """

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._recipients: deque[Recipient] = deque()  # the next one first
        self._waiting: deque[socket.socket] = deque()  # accepted, while no process takes them
        self._later: asyncio.TimerHandle | None = None  # accepts nothing until then

    async def serve(self, name: str, ours: socket.socket, theirs: socket.socket) -> None:
        """Hands connections to the process `name`, once it is ready, until it is stuck or this is cancelled.

        Both ends of its socket pair are needed. What it has not received by the end is handed to another process.
        """
        for end in (ours, theirs):
            end.setblocking(False)
        await self._loop.sock_recv(ours, len(BYTE))
        recipient = Recipient(name, ours, theirs)
        self._recipients.append(recipient)
        self._loop.add_reader(ours, self._hear, recipient)
        self._hand_over()
        try:
            while not recipient.is_stuck:
                await asyncio.sleep(LOOK_SECONDS)
                self._look(recipient)
        finally:
            self._loop.remove_reader(ours)
            self._recipients.remove(recipient)
            self._take_back(recipient)

    def close(self) -> None:
        """Accepts no more, and closes the connections that no process has taken."""
        self._loop.remove_reader(self._listener)
        if self._later is not None:
            self._later.cancel()
        while self._waiting:
            self._waiting.popleft().close()

    def _hear(self, recipient: "Recipient") -> None:
        was_silent = recipient.is_silent
        recipient.hear()
        if was_silent and not recipient.is_silent:
            logger.info("%s answers again, and gets connections", recipient.name)
        self._hand_over()

    def _look(self, recipient: "Recipient") -> None:
        self._hear(recipient)  # first: this process itself may have been stopped, with the answers unread
        was_silent = recipient.is_silent
        recipient.look()
        if recipient.is_silent and not was_silent:
            logger.warning("%s does not answer: it gets no connections until it does", recipient.name)
        if recipient.is_silent:
            self._take_back(recipient)
            recipient.give(None)

    def _take_back(self, recipient: "Recipient") -> None:
        self._waiting.extend(recipient.take_back())
        self._hand_over()

    def _hand_over(self) -> None:
        """Hands over what waits, and accepts more only while a process can take it."""
        while self._waiting and (recipient := self._next()) is not None:
            if recipient.give(self._waiting[0]):
                self._waiting.popleft().close()
        if self._later is None and any(recipient.may_take for recipient in self._recipients):
            self._loop.add_reader(self._listener, self._accept)
        else:
            self._loop.remove_reader(self._listener)

    def _next(self) -> "Recipient | None":
        """Returns the process whose turn it is, after which it is another's. None: there is none."""
        for _ in range(len(self._recipients)):
            recipient = self._recipients[0]
            self._recipients.rotate(-1)
            if recipient.may_take:
                return recipient
        return None

    def _accept(self) -> None:
        try:
            self._waiting.append(self._listener.accept()[0])
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("cannot accept a connection: %s", error.strerror)
            self._later = self._loop.call_later(NO_FILES_SECONDS, self._accept_again)
        self._hand_over()

    def _accept_again(self) -> None:
        self._later = None
        self._hand_over()


class Recipient:
    """A process that answers connections, as the process that hands them over sees it.

    It answers every message, with a connection or without. What it has not received can be received back from `theirs`,
    its own end of the socket pair. The kernel gives each message to one of both, so no connection is answered twice.
    """

    def __init__(self, name: str, ours: socket.socket, theirs: socket.socket):
        self.name = name
        self._ours = ours
        self._theirs = theirs
        self._num_unanswered = 0  # messages
        self._num_missed = 0  # looks since its last answer at which it owed one

    @property
    def is_silent(self) -> bool:
        return self._num_missed >= SILENT_LOOKS

    @property
    def is_stuck(self) -> bool:
        return self._num_missed >= STUCK_LOOKS

    @property
    def may_take(self) -> bool:
        """Whether it gets another connection."""
        return not self.is_silent and self._num_unanswered < MOST_UNANSWERED

    def give(self, connection: socket.socket | None) -> bool:
        """Sends a connection, or None as a heartbeat. Returns whether that was possible; if not, it is silent."""
        files = [] if connection is None else [connection.fileno()]
        try:
            socket.send_fds(self._ours, [BYTE], files)
        except OSError:
            self._num_missed = max(self._num_missed, SILENT_LOOKS)
            return False
        self._num_unanswered += 1
        return True

    def hear(self) -> None:
        """Reads its answers."""
        try:
            num_answers = len(self._ours.recv(MOST_UNANSWERED))
        except BlockingIOError:
            return
        self._num_unanswered = max(self._num_unanswered - num_answers, 0)
        self._num_missed = 0

    def look(self) -> None:
        """Takes note of whether it owes an answer, and has it owe one at the next look."""
        if self._num_unanswered:
            self._num_missed += 1
        else:
            self.give(None)

    def take_back(self) -> Iterator[socket.socket]:
        """Yields the connections that it has not received, and from now on will not."""
        while True:
            try:
                _, files, _, _ = socket.recv_fds(self._theirs, len(BYTE), 1)
            except BlockingIOError:
                return
            self._num_unanswered -= 1
            for file in files:
                yield socket.socket(fileno=file)


class Received(Listener):
    """The end of a socket pair at which another process hands over connections, as a listening socket."""

    def __init__(self, file: int, max_files: int):
        super().__init__(-1, -1, -1, max_files, file)

    def listen(self, backlog: int = 0, /) -> None:
        """Tells the other process that this one is ready. asyncio calls it when it is about to accept."""
        self.send(BYTE)

    def _next(self) -> tuple[socket.socket, Any]:
        _, files, _, _ = socket.recv_fds(self, len(BYTE), 1)
        self.send(BYTE)
        if not files:  # a heartbeat, or the kernel closed a connection for which this process has no file
            raise BlockingIOError
        connection = socket.socket(fileno=files[0])
        connection.set_inheritable(False)
        try:
            return connection, connection.getpeername()
        except OSError:  # the client has left already
            connection.close()
            raise BlockingIOError from None
