"""Logit rules: what nobody asks for is not computed, and each changes the rows that ask and no others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.runtime import logit_rules as rules_module
from jaxvllm.runtime.logit_rules import LogitRule, VocabShare, run_rules
from jaxvllm.runtime.sampler import FILTER_RULES, LOGIT_RULES, sample
from jaxvllm.runtime.slot_fields import DeviceState, Rows
from tests.runtime.test_sampler import VOCAB, Row, state_of

pytestmark = pytest.mark.usefixtures("quick_programs")

ASKING = {
    "TOKEN_MASK": Row(allowed=(3, 9, 11)),
    "ALLOWED_TOKENS": Row(allowed_token_ids=(3, 9, 11)),
    "LOGIT_BIAS": Row(logit_bias=((3, 5.0), (9, -100.0))),
    "MIN_TOKENS": Row(min_length=99, stop_ids=(2, 5)),
    "PENALTIES": Row(repetition_penalty=2.0, prompt=(3, 9)),
    "BAD_WORDS": Row(bad_words=((4,),)),
    "MIN_P": Row(min_p=0.3),
    "TOP_K": Row(top_k=3),
    "TOP_P": Row(top_p=0.4),
}
RULES = dict(zip(ASKING, (*LOGIT_RULES, *FILTER_RULES), strict=True))
WHOLE = VocabShare(VOCAB, VOCAB)


def counting(rule: LogitRule, runs: list[int]) -> LogitRule:
    """`rule`, which notes in `runs` each time that it is computed on the device."""

    def apply(logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
        jax.debug.callback(lambda: runs.append(1))
        return rule.apply(logits, rows, positions, share)

    return replace(rule, apply=apply)


def run(rules: list[LogitRule], rows: list[Row], logits: np.ndarray) -> np.ndarray:
    positions = np.arange(len(rows), dtype=np.int32)
    program: Callable[..., Any] = jax.jit(lambda x, rows: run_rules(rules, x, rows, positions, WHOLE))
    result = np.asarray(program(logits, state_of(rows)))
    jax.effects_barrier()
    return result


@pytest.mark.parametrize("asked", [None, *RULES])
def test_a_stage_is_computed_when_a_row_asks_for_it(asked: str | None) -> None:
    rows = [Row(), Row() if asked is None else ASKING[asked], Row()]
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32)
    runs: dict[str, list[int]] = {name: [] for name in RULES}
    got = run([counting(rule, runs[name]) for name, rule in RULES.items()], rows, logits)
    assert {name for name, times in runs.items() if times} == ({asked} - {None})
    np.testing.assert_array_equal(got[[0, 2]], logits[[0, 2]])
    assert (asked is not None) == (got[1] != logits[1]).any()


@pytest.mark.parametrize("name", RULES)
def test_rows_that_do_not_ask_are_left_as_they_are_even_beside_one_that_does(name: str) -> None:
    rule = RULES[name]
    rows = state_of([ASKING[name], Row(), Row(temperature=0.0)])
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, VOCAB)), jnp.float32)
    positions = jnp.arange(3)
    assert rule.asks(rows, positions).tolist() == [True, False, False]
    got = rule.apply(logits, rows, positions, WHOLE)
    np.testing.assert_array_equal(got[1:], logits[1:])


def test_a_large_field_is_gathered_only_where_a_row_asks() -> None:
    # Gathered before the branch, the masks of 256 rows and 152k tokens would be moved in every step.
    num_rows, words, vocab = 3, 77, 77 * 32
    bits = {name: jnp.zeros((5, words), jnp.int32) for name in ("mask", "allowed", "prompt_tokens")}
    state = dict(state_of([Row()] * 5).state) | bits | {"output_counts": jnp.zeros((5, vocab), jnp.int16)}
    logits, slots, positions = jnp.zeros((num_rows, vocab)), jnp.arange(num_rows), jnp.zeros(num_rows, jnp.int32)

    def whole(logits: jax.Array, state: DeviceState) -> jax.Array:
        return sample(logits, Rows(state, slots), positions, vocab)

    text = jax.jit(whole).lower(logits, state).compile().as_text()
    assert text is not None
    # On CPU a reduction over the vocabulary goes by way of parts, which are as many as the words of a mask.
    always = "\n".join(line for line in text[text.index("\nENTRY") :].splitlines() if "reduce-window" not in line)
    assert f"s32[{num_rows},{words}]" in text, "the masks are gathered somewhere"
    assert f"s32[{num_rows},{words}]" not in always
    assert f"s16[{num_rows},{vocab}]" not in always


def test_every_stage_has_its_own_fields_declared() -> None:
    names = {field.name for rule in RULES.values() for field in rule.fields}
    assert names == {
        *("is_masked", "mask", "is_restricted", "allowed", "is_biased", "biases", "min_length", "late_ids"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty", "prompt_tokens", "output_counts"),
        *("has_bad_words", "bad_words", "num_prompt", "min_p", "top_k", "top_p"),
    }
    in_module = {value for value in vars(rules_module).values() if isinstance(value, LogitRule)}
    assert in_module <= set(RULES.values()), "a rule that no order names"
