"""Sampling parameters that float32 holds badly or not at all, from `SamplingParams` to the device's token."""

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxvllm import LLM, SamplingParams
from tests.engine.tiny import Recomputation, random_prompts

[PROMPT] = random_prompts(1, longest=60, seed=3)


def excluded(logits: np.ndarray, asked: dict[str, float]) -> np.ndarray:
    """bool[V]: the tokens that cannot follow f32[V] logits, in float64 and with what the caller asked for.

    Rounding decides for tokens whose logits are within 1e-3 of a bound, and for 1 % of top_p: those are left in.
    """
    logits = logits.astype(np.float64)
    behind = logits.max() - logits
    if asked["temperature"] < 1e-5:
        return behind > 1e-3
    out = np.zeros(len(logits), np.bool_)
    if asked["min_p"] > 0:
        out |= behind > -np.log(asked["min_p"]) * asked["temperature"] + 1e-3
    weights = np.exp(-behind / asked["temperature"])
    weights[out] = 0
    shares = weights / weights.sum()
    before = np.array([shares[behind < own - 1e-3].sum() for own in behind])
    return out | (before * 0.99 >= asked["top_p"])


def near_zero(largest: float) -> st.SearchStrategy[float]:
    """Floats from 0 to `largest`, most of them at its ends or too small for float32."""
    tiny = st.sampled_from([5e-324, 1e-310, 1e-46, 1e-45, 1e-39, 1.1754943e-38, 1.1754944e-38, 1e-30, 1e-6])
    return st.one_of(tiny, st.sampled_from([0.0, -0.0, largest]), st.floats(0, largest))


askings = st.fixed_dictionaries(
    {
        "temperature": near_zero(1e6).filter(lambda value: value < 1e-5 or value > 0.05),  # else rounding decides
        "top_p": near_zero(1.0),
        "min_p": near_zero(1.0),
    }
)
PLAIN = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(many=st.lists(askings, min_size=8, max_size=8))
@example(many=[PLAIN | {"top_p": value} for value in (5e-324, 1e-46, 1e-45, 1e-39, 1.17e-38, 1.18e-38, 1e-30, 0.5)])
@example(many=[PLAIN | {"min_p": value} for value in (5e-324, 1e-46, 1e-45, 1e-39, 1.17e-38, 1.18e-38, 1.0, 0.5)])
@example(many=[PLAIN | {"temperature": value} for value in (5e-324, 1e-46, 1e-39, 1e-38, 1e-7, 1e5, 1e6, 0.5)])
def test_no_float_yields_a_token_that_it_excludes(
    llm: LLM, recomputation: Recomputation, many: list[dict[str, float]]
) -> None:
    asked, params = [], []
    for one in many:
        try:
            params.append(SamplingParams(**one, seed=len(params), max_tokens=4, ignore_eos=True))  # type: ignore[arg-type]
        except ValueError:
            assert one["top_p"] == 0
            continue
        asked.append(one)
    for one, output in zip(asked, llm.generate([PROMPT] * len(asked), params, use_tqdm=False), strict=True):
        tokens = output.outputs[0].token_ids
        for row, token in zip(recomputation.logits(PROMPT, tokens), tokens, strict=True):
            assert not excluded(row, one)[token], f"token {token} for {one}"
