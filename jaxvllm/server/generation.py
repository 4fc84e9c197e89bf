"""`Generation`: the work of the engine for one HTTP request, which completes each of its prompts `n` times."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest, Prompt
from jaxvllm.core.sampling_params import MAX_N, RequestOutputKind, SamplingParams
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.server.service import Service
from jaxvllm.text.prompts import PromptReader
from jaxvllm.worker.request_stream import RequestStream

# The most completions of one HTTP request. Each is a request of the scheduler, and a body of 8 MB could ask for
# millions of them.
MAX_CHOICES = MAX_N


# The most log-probabilities in an answer that does not stream. Each takes 700 bytes in transit, and 2 us of the event
# loop.
MAX_LOGPROB_ENTRIES = 2**19


class Generation:
    """The engine's requests for one HTTP request. Leaving its context aborts those that have not ended.

    Reading it raises TimeoutError after the server's request_timeout.
    """

    def __init__(self, service: Service):
        self._streams: list[RequestStream] = []
        self._open = ExitStack()
        self._open.enter_context(service.opened())
        self._deadline = asyncio.get_running_loop().time() + service.config.request_timeout

    @classmethod
    async def start(cls, service: Service, requests: Sequence[GenerationRequest]) -> Self:
        """Queues all requests, which must have equal parameters, or none of them.

        Raises the errors of `AsyncLLM.submit`, and ValueError for too many choices.
        """
        params = requests[0].params
        if (choices := len(requests) * params.num_sequences) > MAX_CHOICES:
            raise ParameterError(
                f"n (or best_of) times the number of prompts is {choices}, and the most is {MAX_CHOICES}: send several "
                "requests",
                "n",
            )
        most = service.llm.max_requests
        if most is not None and choices > most:
            raise ParameterError(
                f"n (or best_of) times the number of prompts is {choices}, and at most {most} may run and wait: lower "
                "it",
                "n",
            )
        params = _bounded(params, [request.prompt for request in requests], service.reader)
        generation = cls(service)
        try:
            async with asyncio.timeout_at(generation._deadline), service.queueing():
                for request in requests:
                    generation._streams.append(service.llm.enqueue(replace(request, params=params)))
                for stream in generation._streams:  # the engine accepts all of them at once, between two steps
                    await stream.accepted()
        except BaseException:
            await generation.close()
            raise
        # asyncio.timeout would not work, because another task may read the outputs.
        timer = asyncio.get_running_loop().call_at(generation._deadline, generation._time_out)
        generation._open.callback(timer.cancel)
        return generation

    @property
    def warnings(self) -> list[str]:
        """The demands of the requests that cannot be enforced, each once."""
        return list(dict.fromkeys(text for stream in self._streams for text in stream.warnings))

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yields every output as it comes, with the index of its prompt."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, output
            return
        waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    output = task.result()
                    if not output.finished:
                        waiting[asyncio.ensure_future(anext(self._streams[index]))] = index
                    yield index, output
        finally:
            for task in waiting:
                task.cancel()

    async def results(self) -> list[RequestOutput]:
        """Returns the last output of each prompt."""
        last: dict[int, RequestOutput] = {}
        async for index, output in self.outputs():
            last[index] = output
        return [last[index] for index in range(len(self._streams))]

    async def close(self) -> None:
        """Aborts the requests that have not ended."""
        self._open.close()
        for stream in self._streams:
            await stream.aclose()

    def _time_out(self) -> None:
        for stream in self._streams:
            stream.abort(TimeoutError())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _bounded(params: SamplingParams, prompts: Sequence[Prompt], reader: PromptReader) -> SamplingParams:
    """Returns `params`, with a max_tokens if nothing else bounds the number of log-probabilities in the answer.

    Raises ValueError when there would be too many. A stream sends those of the output as they come, so only those of
    its prompts count.
    """
    of_prompts = 0
    if params.prompt_logprobs is not None:
        of_token = params.num_prompt_logprobs(reader.vocab_size) + 1
        of_prompts = sum(len(prompt.token_ids) for prompt in prompts) * of_token
    entries = of_prompts
    if params.wants_logprobs and params.output_kind is not RequestOutputKind.DELTA:
        of_each = len(prompts) * params.n * (params.num_logprobs(reader.vocab_size) + 1)  # if all get one token
        if params.max_tokens is None:
            room = reader.max_model_len - min(len(prompt.token_ids) for prompt in prompts)
            most = max((MAX_LOGPROB_ENTRIES - entries) // of_each, 1)
            params = replace(params, max_tokens=min(room, most), min_tokens=min(params.min_tokens, room, most))
        entries += of_each * (params.max_tokens or 0)
    if of_prompts > MAX_LOGPROB_ENTRIES:
        raise ParameterError(
            f"prompt_logprobs of up to {of_prompts} tokens are asked for, and the most is {MAX_LOGPROB_ENTRIES}: lower "
            "prompt_logprobs, or send several requests",
            "prompt_logprobs",
        )
    if entries > MAX_LOGPROB_ENTRIES:
        raise ParameterError(
            f"logprobs of up to {entries} tokens are asked for, and the most is {MAX_LOGPROB_ENTRIES}: lower logprobs, "
            "max_tokens or n, send several requests, or let it stream",
            "logprobs",
        )
    return params
