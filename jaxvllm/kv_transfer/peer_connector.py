"""Pages from one engine to another over TCP: one computes prompts, the other goes on from there."""

import logging
import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import batched

import msgspec
import zmq

from jaxvllm.core.lora import given_salt
from jaxvllm.core.request import Request
from jaxvllm.kv_transfer.connector import TransferParams
from jaxvllm.kv_transfer.page_format import Page, WrongPage
from jaxvllm.kv_transfer.page_memory import PageMemory
from jaxvllm.kv_transfer.page_server import PageServer
from jaxvllm.kv_transfer.peer_fetches import Fetched, PeerAddress, PeerFetches
from jaxvllm.kv_transfer.peer_messages import ANSWERS_AHEAD, PAGES_PER_ANSWER, Done, Want, decode_answer, encode
from jaxvllm.kv_transfer.tickets import (
    Ticket,
    WrongTicket,
    prompt_digest,
    wants_remote_decode,
    wants_remote_prefill,
)
from jaxvllm.kv_transfer.transports import PageTransport

logger = logging.getLogger(__name__)

# How often a thread that waits for a peer looks whether this engine ends.
_LOOK_MILLISECONDS = 100


@dataclass(frozen=True)
class PeerOptions:
    """The options by which engines reach each other. Others know this engine as `host`, and it listens there."""

    engine_id: str
    secret: str
    host: str = "127.0.0.1"
    port: int = 0  # 0: any
    hold_seconds: float = 60.0  # pages that nobody fetches are free after this time
    silence_seconds: float = 6.0  # a peer that says nothing for so long is given up, and not asked again for so long


class PeerConnector:
    """Offers the pages of prompts that were computed for others, and fetches those that others offer.

    It saves only pages of requests that say `do_remote_decode`, and loads only for those that say `do_remote_prefill`
    with a ticket that is signed with the same secret.
    """

    def __init__(self, options: PeerOptions, memory: PageMemory, page_size: int, transport: PageTransport):
        self._options = options
        self._memory = memory
        self._page_size = page_size
        self._transport = transport
        self._server = PageServer(memory, transport, options.host, options.port)
        self._context = zmq.Context()
        self._fetches = PeerFetches(options.silence_seconds)
        self._ends = threading.Event()

    @property
    def server(self) -> PageServer:
        return self._server

    def num_pages(self, request: Request, hashes: Sequence[bytes]) -> int:
        ticket = self._ticket(request.asked.kv_transfer_params)
        if ticket is None or not self._transport.is_ready or self._fetches.is_avoided(_address(ticket)):
            return 0
        if not hashes:
            self._begin(ticket, ())
            return 0
        # `hashes` are the last ones of those that it may have from others: what is cached here is not fetched.
        first = (request.num_tokens - 1) // self._page_size - len(hashes)
        return min(max(ticket.remote_num_tokens // self._page_size - first, 0), len(hashes))

    def load(self, request: Request, hashes: Sequence[bytes]) -> Future[Sequence[Page]]:
        ticket = self._ticket(request.asked.kv_transfer_params)
        if ticket is None:  # it has expired a moment ago
            nothing: Future[Sequence[Page]] = Future()
            nothing.set_result(())
            return nothing
        return self._begin(ticket, tuple(hashes))

    def _begin(self, ticket: Ticket, hashes: tuple[bytes, ...]) -> Future[Sequence[Page]]:
        return self._fetches.submit(_address(ticket), lambda: self._fetch(ticket, hashes))

    def wants(self, request: Request, digest: bytes) -> bool:
        return wants_remote_decode(request.asked.kv_transfer_params) and digest not in self._memory

    def save(self, digest: bytes, page: Page) -> bool:
        self._memory.put(digest, page)
        return True

    def finished(self, request: Request, hashes: Sequence[bytes]) -> TransferParams | None:
        if not wants_remote_decode(request.asked.kv_transfer_params):
            return None
        if not hashes:
            return None
        if self._memory.is_full:
            logger.warning("the pages of request %s are not offered: those that are held fill the memory", request)
            return None
        options, count = self._options, len(hashes) * self._page_size
        ticket = Ticket(
            options.engine_id,
            secrets.token_hex(16),
            options.host,
            self._server.port,
            count,
            prompt_digest(request.prompt_token_ids[:count], given_salt(request.asked.prompt.cache_salt)),
            math.ceil(time.time() + options.hold_seconds),
        )
        self._server.offer(ticket.remote_request_id, ticket.signature(options.secret), hashes, options.hold_seconds)
        return ticket.signed(options.secret)

    def reset(self) -> None:
        """Forgets pages that others were promised, too. They compute them."""
        self._memory.clear()

    def close(self) -> None:
        self._ends.set()
        self._fetches.close()
        self._context.destroy(linger=0)
        self._server.close()

    def _ticket(self, params: Mapping[str, object] | None) -> Ticket | None:
        """Returns the ticket in the parameters of a request; None: there is none, or not one that can be followed."""
        if params is None or not wants_remote_prefill(params):
            return None
        try:
            ticket = Ticket.read(params)
        except WrongTicket as error:  # requests are checked at the door, so this came another way
            logger.warning("a prompt is computed here, and not fetched: %s", error)
            return None
        if not ticket.is_signed(params, self._options.secret):
            text = "a prompt is computed here, and not fetched: its ticket is not signed with the secret of this engine"
            logger.warning(text)
            return None
        if ticket.remote_expires < time.time():
            logger.warning(
                "a prompt is computed here, and not fetched: its ticket has expired %.0f s ago. If it did not wait so "
                "long, the clocks of the hosts differ",
                time.time() - ticket.remote_expires,
            )
            return None
        return ticket

    def _fetch(self, ticket: Ticket, hashes: tuple[bytes, ...]) -> Fetched:
        """Fetches the first of these pages, as far as they come in time and are what they should be."""
        signature = ticket.signature(self._options.secret)
        questions = [list(some) for some in batched(hashes, PAGES_PER_ANSWER)]
        pages: list[Page] = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            # A page that claims to be larger than pages are closes the connection.
            socket.setsockopt(zmq.MAXMSGSIZE, self._transport.most_bytes)
            socket.setsockopt(zmq.SNDTIMEO, int(1000 * self._options.silence_seconds))
            num_asked = 0
            try:
                socket.connect(f"tcp://{ticket.remote_host}:{ticket.remote_port}")
                for number, question in enumerate(questions):
                    while num_asked < min(number + ANSWERS_AHEAD, len(questions)):
                        want = Want(
                            num_asked,
                            ticket.remote_request_id,
                            signature,
                            self._transport.fingerprint,
                            questions[num_asked],
                        )
                        socket.send(encode(want))
                        num_asked += 1
                    got = self._answer(socket, number, question)
                    pages += got
                    if len(got) < len(question):
                        break
                socket.send(encode(Done(ticket.remote_request_id, signature)))
            except (zmq.ZMQError, msgspec.MsgspecError, WrongPage, TimeoutError) as error:
                if not self._ends.is_set():
                    logger.warning("pages of %s:%d are computed: %s", ticket.remote_host, ticket.remote_port, error)
                return Fetched(pages, peer_failed=True)
            socket.setsockopt(zmq.LINGER, 1000)
        return Fetched(pages)

    def _answer(self, socket: "zmq.Socket[bytes]", number: int, question: Sequence[bytes]) -> list[Page]:
        """Waits for the pages of question `number`. Raises TimeoutError when nothing comes, and WrongPage."""
        deadline = time.monotonic() + self._options.silence_seconds
        while True:
            while not socket.poll(min(max(int(1000 * (deadline - time.monotonic())), 0), _LOOK_MILLISECONDS)):
                if self._ends.is_set():
                    raise TimeoutError("this engine ends")
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"nothing came for {self._options.silence_seconds:g} s")
            first, *frames = socket.recv_multipart()
            answer = decode_answer(first)
            if answer.number != number:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no answer to the question came for {self._options.silence_seconds:g} s")
                continue
            if len(frames) > len(question):
                raise WrongPage(f"{len(frames)} frames came where {len(question)} pages were asked for")
            pages = self._transport.take(frames, question, deadline - time.monotonic())
            if answer.reason:
                logger.warning("only %d of %d pages came: %s", len(pages), len(question), answer.reason)
            return pages


def _address(ticket: Ticket) -> PeerAddress:
    return ticket.remote_host, ticket.remote_port
