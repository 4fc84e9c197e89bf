"""What one HTTP request makes the engine do: a prompt or several, each completed `n` times."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.sampling_params import MAX_N, RequestOutputKind, SamplingParams
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.prompts import Prompt
from jaxvllm.engine.request_stream import RequestStream
from jaxvllm.server.service import Service

# Of one request. Each is a request of the scheduler, and a body of 8 MB could ask for millions of them.
MAX_CHOICES = MAX_N


@dataclass(frozen=True)
class Job:
    """Prompts that were checked, and how to complete each of them."""

    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0


# Log-probabilities of one answer that does not stream: 700 bytes each on their way, and 2 us of the event loop.
MAX_LOGPROB_ENTRIES = 2**19


class Generation:
    """A job under way. Whoever leaves it aborts what has not ended; TimeoutError after the server's request_timeout."""

    def __init__(self, service: Service):
        self._streams: list[RequestStream] = []
        self._open = ExitStack()
        self._open.enter_context(service.opened())
        self._deadline = asyncio.get_running_loop().time() + service.config.request_timeout

    @classmethod
    async def start(cls, service: Service, job: Job) -> Self:
        """Queues all prompts, or none. Errors are those of `AsyncLLM.submit`, and ValueError for too many choices."""
        if (choices := len(job.prompts) * job.params.n) > MAX_CHOICES:
            raise ParameterError(
                f"n times the prompts is {choices}, and the most is {MAX_CHOICES}: send several requests", "n"
            )
        most = service.llm.max_requests
        if most is not None and choices > most:
            raise ParameterError(
                f"n times the prompts is {choices}, and {most} are the most that may run and wait: lower n", "n"
            )
        params = _bounded(job.params, job.prompts, service.reader.max_model_len)
        generation = cls(service)
        try:
            async with asyncio.timeout_at(generation._deadline):
                for index, prompt in enumerate(job.prompts):
                    name = job.request_id if len(job.prompts) == 1 else f"{job.request_id}-{index}"
                    stream = service.llm.enqueue(prompt, params, name, priority=job.priority)
                    generation._streams.append(stream)
                for stream in generation._streams:  # the engine answers between steps: to all of them at once
                    await stream.accepted()
        except BaseException:
            await generation.close()
            raise
        # Not asyncio.timeout: the outputs may be read by another task.
        timer = asyncio.get_running_loop().call_at(generation._deadline, generation._time_out)
        generation._open.callback(timer.cancel)
        return generation

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Every output, with the index of its prompt, as they come."""
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
        """The last output of each prompt."""
        last: dict[int, RequestOutput] = {}
        async for index, output in self.outputs():
            last[index] = output
        return [last[index] for index in range(len(self._streams))]

    async def close(self) -> None:
        """Aborts what has not ended."""
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


def _bounded(params: SamplingParams, prompts: Sequence[Prompt], max_model_len: int) -> SamplingParams:
    """The same, with max_tokens where nothing else bounds the answer's log-probabilities.

    ValueError when they are too many. Those of what streams are sent as they come, but for the prompt's.
    """
    of_prompts = 0
    if params.prompt_logprobs is not None:
        of_prompts = sum(len(prompt.token_ids) for prompt in prompts) * (params.prompt_logprobs + 1)
    entries = of_prompts
    if params.logprobs is not None and params.output_kind is not RequestOutputKind.DELTA:
        of_each = len(prompts) * params.n * (params.logprobs + 1)  # token that each completion gets
        if params.max_tokens is None:
            room = max_model_len - min(len(prompt.token_ids) for prompt in prompts)
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
