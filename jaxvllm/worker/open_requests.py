"""The requests of a client that have not ended. They complete the outputs from the wire and pass them to streams."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
from jaxvllm.worker import wire
from jaxvllm.worker.request_stream import RequestStream


class DivergedError(Exception):
    """Raised when an engine computes other tokens than the engine that died had sent."""


@dataclass
class SentCompletion:
    """The tokens and characters of a completion that were sent so far."""

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    is_over: bool = False

    def add(self, token_ids: list[int], num_chars: int, is_over: bool) -> None:
        self.token_ids += token_ids
        self.num_chars += num_chars
        self.is_over |= is_over


class OpenRequest:
    """A request that has not ended, with the stream for its outputs."""

    def __init__(self, request: GenerationRequest):
        self.request = request
        self.stream = RequestStream(request)
        self.num_rewinds = 0
        self._kind = request.params.output_kind
        self._scores: list[dict[int, Logprob] | None] | FlatLogprobs | None = None
        self.is_queued = True  # no output has come from its engine yet
        self._has_started = False  # its engine has computed a token of it
        self._has_delivered = False
        # Of each completion: what the caller has, and what this engine has sent, which is less after a rewind.
        self._delivered: defaultdict[int, SentCompletion] = defaultdict(SentCompletion)
        self._computed: defaultdict[int, SentCompletion] = defaultdict(SentCompletion)

    @property
    def may_kill(self) -> bool:
        """Whether it may be what has ended its engine: it had no token yet, or native code follows its form.

        Most of what may be wrong with a request shows before its first token.
        """
        return not self._has_started or self.request.params.structured_outputs is not None

    def started(self) -> None:
        """Takes note that its engine has computed a token of it."""
        self._has_started = True

    def rewind(self) -> None:
        """Takes note that another engine, or the same one again, computes the request from its beginning.

        Its tokens are the same if the request has a seed, because they depend on nothing else. They are compared with
        those that the caller has, who gets only what is new.
        """
        self.num_rewinds += 1
        self.is_queued, self._has_started = True, False
        self._computed.clear()

    def deliver(self, output: wire.Output) -> RequestOutput | None:
        """Completes `output` with what the wire leaves out, puts it into the stream, and returns it.

        Returns None when the caller has all of it, from an engine that died. Raises DivergedError when that engine had
        sent something else.
        """
        self.is_queued, self._has_started = False, True
        self._scores = output.prompt_logprobs or self._scores  # the engine sends them once
        is_delta = self._kind is RequestOutputKind.DELTA
        completions, scores = output.completions, output.prompt_logprobs if is_delta else self._scores
        if is_delta:
            completions = [new for completion in completions if (new := self._news(completion)) is not None]
            if self.num_rewinds and self._has_delivered:
                scores = None
                if not completions and not output.finished:
                    return None
        elif self._kind is RequestOutputKind.CUMULATIVE and not self._catches_up(completions):
            return None
        self._has_delivered = True
        delivered = RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt.text,
            prompt_token_ids=self.request.prompt.token_list,
            outputs=completions,
            finished=output.finished,
            metrics=output.metrics,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=scores,
            pooled=None if output.pooled is None else np.frombuffer(output.pooled, "<f4"),
            kv_transfer_params=output.kv_transfer_params,
            warnings=output.warnings,
        )
        self.stream.put(delivered)
        return delivered

    def _news(self, delta: CompletionOutput) -> CompletionOutput | None:
        """Returns what the caller does not have of a part of a completion, or None if he has all of it."""
        known, ids, is_over = self._delivered[delta.index], delta.token_ids, delta.finish_reason is not None
        if not self.num_rewinds:
            known.add(ids, len(delta.text), is_over)
            return delta
        computed, was_over = self._computed[delta.index], known.is_over
        start = len(computed.token_ids)
        num_ids = min(max(len(known.token_ids) - start, 0), len(ids))
        num_chars = min(max(known.num_chars - computed.num_chars, 0), len(delta.text))
        _check_same(ids[:num_ids], known.token_ids[start : start + num_ids])
        computed.add(ids, len(delta.text), is_over)
        known.add(ids[num_ids:], len(delta.text) - num_chars, is_over)
        if was_over or not (len(ids) > num_ids or len(delta.text) > num_chars or is_over):
            return None
        logprobs, spans = delta.logprobs, delta.draft_spans
        return replace(
            delta,
            text=delta.text[num_chars:],
            token_ids=ids[num_ids:],
            logprobs=None if logprobs is None else logprobs[num_ids:],
            draft_spans=None if spans is None else _spans_from(spans, num_chars),
        )

    def _catches_up(self, completions: list[CompletionOutput]) -> bool:
        """Returns whether completions from their beginnings have at least what the caller has."""
        for completion in completions:
            ids, known = completion.token_ids, self._delivered[completion.index]
            _check_same(ids[: len(known.token_ids)], known.token_ids[: len(ids)])
            if len(ids) < len(known.token_ids) or len(completion.text) < known.num_chars:
                return False
        for completion in completions:
            self._delivered[completion.index] = SentCompletion(completion.token_ids, len(completion.text))
        return True


def _check_same(computed: list[int], delivered: list[int]) -> None:
    if computed != delivered:
        raise DivergedError(
            "the engine died while it worked on this request, and another computes other tokens: send it again"
        )


def _spans_from(spans: list[tuple[str, bool]], num_chars: int) -> list[tuple[str, bool]]:
    """Returns the parts of a text without its first `num_chars` characters."""
    left = []
    for text, is_draft in spans:
        if rest := text[num_chars:]:
            left.append((rest, is_draft))
        num_chars = max(num_chars - len(text), 0)
    return left


class OpenRequests:
    """The requests of a client that have not ended, by id and by the serial that each has on the wire.

    A request ends when it leaves this table, and `forget` returns it to only one caller. So its end is reported once,
    even if a last output, an abort, a timeout and the end of the engine coincide.
    """

    def __init__(self) -> None:
        self._serials = count()
        self._requests: dict[int, OpenRequest] = {}
        self._serial_of: dict[str, int] = {}
        # Serials that the engine has neither accepted nor rejected. They include requests whose caller has left: their
        # messages still wait for the engine.
        self._unanswered: set[int] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._serial_of

    async def idle(self) -> None:
        """Waits until there is no request."""
        await self._idle.wait()

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of the prompts of requests without an output. Takes O(requests)."""
        return sum(len(one.request.prompt.token_ids) for one in self._requests.values() if one.is_queued)

    @property
    def num_unanswered(self) -> int:
        return len(self._unanswered)

    def new_serial(self) -> int:
        """Returns a serial that no request has had."""
        return next(self._serials)

    def add(self, serial: int, request: OpenRequest) -> None:
        self._requests[serial] = request
        self._serial_of[request.request.request_id] = serial
        self._unanswered.add(serial)
        self._idle.clear()

    def get(self, serial: int) -> OpenRequest | None:
        return self._requests.get(serial)

    def serial_of(self, request_id: str) -> int | None:
        return self._serial_of.get(request_id)

    def serials(self, accepted: bool = False) -> list[int]:
        """Returns the serials of all requests, or only of those that the present engine has `accepted`."""
        return [serial for serial in self._requests if not accepted or serial not in self._unanswered]

    def answered(self, serial: int) -> None:
        """Takes note that the engine has accepted or rejected the request."""
        self._unanswered.discard(serial)

    def clear_unanswered(self) -> None:
        """Takes note that the engine has ended, so that it will not answer the requests that it was sent."""
        self._unanswered.clear()

    def forget(self, serial: int) -> OpenRequest | None:
        """Removes and returns a request that ends, or returns None when it had ended already."""
        request = self._requests.pop(serial, None)
        if request is not None:
            del self._serial_of[request.request.request_id]
            if not self._requests:
                self._idle.set()
        return request
