"""Where the reasoning ends, where it is made to end, and that the answer is constrained from there on."""

import pytest

from jaxvllm.grammar.reasoning import ReasoningConstraint, ReasoningMarks
from jaxvllm.text.reasoning import ReasoningFormat
from tests.grammar.demo import EOS, VOCAB_SIZE, allowed, compiled, tokenizer, tokens

ALL = set(range(VOCAB_SIZE))
# Marks of one token, and of several.
SHORT = ("<tool_call>", "</tool_call>")
LONG = ("<think>", "</think>")


def constraint(
    marks: tuple[str, str], prompt: str, budget: int | None = None, form: str | None = "yes|no", is_open: bool = False
) -> ReasoningConstraint:
    made = ReasoningMarks(ReasoningFormat(*marks, is_open=is_open), tokenizer())
    answer = None if form is None else compiled(regex=form).constraint()
    return ReasoningConstraint(made, tokens(prompt), answer, budget)


@pytest.mark.parametrize("marks", [SHORT, LONG])
def test_the_answer_is_constrained_behind_the_mark(marks: tuple[str, str]) -> None:
    start, end = marks
    one = constraint(marks, f"Question{start}")
    for token in [*tokens("any thought, yes or no"), *tokens(end)]:
        assert allowed(one) == ALL and not one.forced() and not one.is_complete
        one.advance([token])
    assert allowed(one) == allowed(compiled(regex="yes|no").constraint())
    one.advance(tokens("no"))
    assert one.is_complete and allowed(one) == {EOS}


@pytest.mark.parametrize("marks", [SHORT, LONG])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_prompt_that_ends_the_reasoning_leaves_none(marks: tuple[str, str], is_open: bool) -> None:
    start, end = marks
    one = constraint(marks, f"Question{start}\n\n{end}\n\n", budget=3, is_open=is_open)
    assert allowed(one) == allowed(compiled(regex="yes|no").constraint())


def test_some_models_begin_inside_the_reasoning() -> None:
    assert allowed(constraint(SHORT, "Question", is_open=True)) == ALL


def test_a_model_may_think_or_answer_at_once() -> None:
    [start], [end] = (tokens(mark) for mark in SHORT)
    answer = allowed(compiled(regex="yes|no").constraint())
    thinks, answers = constraint(SHORT, "Question"), constraint(SHORT, "Question")
    assert allowed(thinks) == allowed(answers) == {start, *answer}
    thinks.advance([start])
    assert allowed(thinks) == ALL
    thinks.advance([end])
    assert allowed(thinks) == answer, "it thinks once"
    answers.advance(tokens("y"))
    assert answers.forced() == tokens("es") and start not in allowed(answers)


@pytest.mark.parametrize("marks", [SHORT, LONG])
@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("form", ["yes|no", None])
def test_a_budget_ends_the_reasoning(marks: tuple[str, str], budget: int, form: str | None) -> None:
    start, end = marks
    one = constraint(marks, f"Question{start}", budget, form)
    for token in tokens("a b c d e f")[:budget]:
        assert allowed(one) == ALL and not one.forced()
        one.advance([token])
    forced = tokens(end)
    assert list(one.forced()) == forced
    for index, token in enumerate(forced):
        assert allowed(one) == {token} and list(one.forced()) == forced[index:]
        one.advance([token])
    assert allowed(one) == (ALL if form is None else allowed(compiled(regex=form).constraint()))


def test_without_a_form_the_budget_holds_again_when_it_thinks_again() -> None:
    [start], [end] = (tokens(mark) for mark in SHORT)
    one = constraint(SHORT, "Question", budget=2, form=None)
    for _ in range(2):
        one.advance(tokens("Some text"))
        assert allowed(one) == ALL
        one.advance([start, *tokens("a b")[:2]])
        assert allowed(one) == {end} and list(one.forced()) == [end]
        one.advance([end])
        assert allowed(one) == ALL and not one.is_complete


def test_many_tokens_at_once_are_the_same_as_one_by_one() -> None:
    text = [*tokens("thinking about it"), *tokens(LONG[1]), *tokens("ye")]
    at_once, one_by_one = (constraint(LONG, f"Question{LONG[0]}") for _ in range(2))
    at_once.advance(text)
    for token in text:
        one_by_one.advance([token])
    assert allowed(at_once) == allowed(one_by_one)
    assert list(at_once.forced()) == list(one_by_one.forced())
