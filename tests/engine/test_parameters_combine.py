"""Every sampling parameter with every other: the tokens are those of the request alone, whatever runs beside it."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jaxvllm import LLM, RequestOutput, SamplingParams
from tests.engine.tiny import assert_idle
from tests.run_cache import run_cache

NUM_REQUESTS = 48
PROMPTS = (
    "Once upon a time",
    "Tom and Lily lived in a farmhouse. Tom had a red ball, and Lily had a red kite. One day the red ball",
    "The fox, the fox, the fox and the hen went to the fox's house, and the hen said to the fox: ",
    "Here is a person as JSON: ",
)
# For each parameter, values that change something, and None: the default.
VALUES: dict[str, Sequence[Any]] = {
    "temperature": (0.0, 0.8, 1.5),
    "repetition_penalty": (None, 1.3, 0.8),
    "presence_penalty": (None, 0.7, -1.0),
    "frequency_penalty": (None, 1.2),
    "logit_bias": (None, {300: 3.0, 301: -100.0, 12: 1.5}),
    "bad_words": (None, ["the", "a little"]),
    "min_p": (None, 0.05),
    "top_k": (None, 40),
    "top_p": (None, 0.9),
    "min_tokens": (None, 6),
    "logprobs": (None, None, 0, 3, 25),
    "n": (None, None, 3),
    "structured_outputs": (
        None,
        None,
        {"regex": "[A-Z][a-z]{2,9}( [a-z]{1,8}){1,4}\\."},
        {"choice": ["the red fox", "the red hen", "a house"]},
        {
            "json": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 8},
                    "age": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            }
        },
    ),
    "repetition_detection": (None, None, {"max_pattern_size": 3, "min_count": 3}),
    "stop": (None, None, ["fox"]),
    "skip_reading_prefix_cache": (None, None, True),
}


def requests() -> list[tuple[str, SamplingParams]]:
    """Random combinations, the same in every run. All have seeds, so that the order of submission decides nothing."""
    draw = random.Random(13)
    made = []
    for seed in range(NUM_REQUESTS):
        chosen = {name: draw.choice(values) for name, values in VALUES.items()}
        params = {name: value for name, value in chosen.items() if value is not None}
        made.append((draw.choice(PROMPTS), SamplingParams(**params, seed=seed, max_tokens=draw.randint(8, 24))))
    return made


REQUESTS = requests()


def told(output: RequestOutput) -> list[tuple[Any, ...]]:
    """What must not depend on the batch: tokens, text, the end, and which tokens were the most likely."""
    return [
        (
            c.token_ids,
            c.text,
            c.finish_reason,
            c.stop_reason,
            None if c.logprobs is None else [list(ranked) for ranked in c.logprobs],
        )
        for c in output.outputs
    ]


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[tuple[Any, ...]]]]:
    """Each alone: no bursts, no chunks, no cached prefix, no preemption."""
    llm = LLM(
        dtype="float32",
        max_num_seqs=8,  # as below, so that the sampler is the same
        row_buckets=(8,),
        max_num_batched_tokens=64,
        token_buckets=(64,),
        max_model_len=256,
        max_decode_burst=1,
        enable_prefix_caching=False,
        max_logprobs=30,
        compilation_cache=run_cache(),
    )
    yield [told(llm.generate(prompt, params, use_tqdm=False)[0]) for prompt, params in REQUESTS]
    assert llm.engine.stats().num_preemptions == 0
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x1", "1x2"])
def test_together_as_alone(expected: list[list[tuple[Any, ...]]], mesh: str) -> None:
    llm = LLM(
        dtype="float32",
        mesh=mesh,
        max_num_seqs=8,
        row_buckets=(8,),
        max_num_batched_tokens=16,
        token_buckets=(16,),
        max_model_len=256,
        page_size=16,
        num_pages=10,
        max_logprobs=30,
        compilation_cache=run_cache(),
    )
    outputs = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS], use_tqdm=False)
    for (prompt, params), output, alone in zip(REQUESTS, outputs, expected, strict=True):
        assert told(output) == alone, (prompt, params)
    assert llm.engine.stats().num_preemptions > 0
    assert_idle(llm)
    llm.close()
