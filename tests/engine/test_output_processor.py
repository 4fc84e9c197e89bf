"""What the output processor makes of an update: the rare ends that no engine run reaches by itself."""

import numpy as np
import pytest

from jaxvllm.core.request import FinishReason, GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.step_plan import Emitted, Finished, StepOutput, StepUpdate, TopLogprobs
from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.engine.outputs import CompletionOutput, RequestOutput
from tests.text.small_tokenizers import small_tokenizer

PROMPT = np.array([1], np.int32)


def ids(*pieces: str) -> list[int]:
    backend = small_tokenizer("byte_fallback").backend
    return [token_id for piece in pieces if (token_id := backend.token_to_id(piece)) is not None]


def run(
    params: SamplingParams, tokens: list[int], reason: FinishReason, num_preemptions: int = 0
) -> tuple[RequestOutput, list[list[str]]]:
    """One request that gets `tokens`, one an update, and ends for `reason` with the last."""
    outputs = OutputProcessor(small_tokenizer("byte_fallback"))
    asked = GenerationRequest("r", Prompt(None, PROMPT), params)
    request = Request(asked, 0, (), 99, QueueKey(0, 0))
    request.num_preemptions = num_preemptions
    outputs.add(asked, ["r"], 0.0)
    stops = []
    for count, token_id in enumerate(tokens, 1):
        last = count == len(tokens)
        request.output_token_ids = np.array(tokens[:count], np.int32)
        update = StepUpdate(
            num_new_tokens=1,
            started=(request,) if count == 1 else (),
            emitted=(Emitted(request, 0, token_id),),
            finished=(Finished(request, reason, hides_last=reason == FinishReason.STOP),) if last else (),
        )
        top = np.array([[token_id, 5]], np.int32)
        values = TopLogprobs(np.float32([-0.5]), np.int32([1]), top, np.float32([[-0.5, -2.0]]))
        processed = outputs.process(update, StepOutput(np.int32([[token_id]]), np.int32([1]), values))
        results, stopped = processed.outputs, processed.stopped
        stops.append(stopped)
        if "r" not in outputs:
            break
    assert outputs.num_requests == 0
    return results[-1], stops


def completion(output: RequestOutput) -> CompletionOutput:
    return output.outputs[0]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_bytes_that_waited_until_the_end_may_be_a_stop_string(reason: FinishReason) -> None:
    # The last byte of a run decides whether the others are text, so the string is whole only at the end.
    tokens = ids("h", "<0xE6>", "<0x9D>", "<0xB1>")
    tail = ids("</s>") if reason == FinishReason.STOP else []
    params = SamplingParams(stop=["東"], logprobs=1)
    output, _ = run(params, tokens + tail, reason)
    result = completion(output)
    assert (result.finish_reason, result.stop_reason, result.text) == ("stop", "東", "h")
    assert result.token_ids == tokens  # EOS came after what had ended it already
    assert result.logprobs is not None and len(result.logprobs) == len(tokens)
    assert result.cumulative_logprob == -0.5 * len(tokens)


def test_without_that_stop_string_the_bytes_are_text() -> None:
    tokens = ids("h", "<0xE6>", "<0x9D>", "<0xB1>")
    output, _ = run(SamplingParams(stop=["x"]), tokens, FinishReason.LENGTH)
    result = completion(output)
    assert (result.finish_reason, result.stop_reason, result.text) == ("length", None, "h東")


def test_a_token_is_spelt_as_it_reads_inside_a_text() -> None:
    # A full decode of this token alone would drop its space.
    output, _ = run(SamplingParams(logprobs=1), ids("▁hello"), FinishReason.LENGTH)
    logprobs = completion(output).logprobs
    assert logprobs is not None
    assert logprobs[0][ids("▁hello")[0]].decoded_token == " hello"


def test_a_stop_string_and_the_limit_at_the_same_token_count_once() -> None:
    output, stops = run(SamplingParams(stop=["hl"]), ids("h", "l"), FinishReason.LENGTH, num_preemptions=3)
    assert (completion(output).finish_reason, completion(output).stop_reason) == ("stop", "hl")
    assert stops == [[], []]  # the scheduler has ended it already
    assert output.metrics is not None and output.metrics.num_preemptions == 3


def test_a_stop_string_before_the_limit_is_told_to_the_scheduler() -> None:
    output, stops = run(SamplingParams(stop=["hl"]), ids("h", "l", "o"), FinishReason.LENGTH, num_preemptions=2)
    assert stops == [[], ["r"]]
    assert output.metrics is not None and output.metrics.num_preemptions == 2
