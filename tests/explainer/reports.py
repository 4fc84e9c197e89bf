"""A report as engines make them, of two requests that share a page, made without an engine."""

from jaxvllm.core.explanation import (
    Admitted,
    Decode,
    ExplainedStep,
    Explanation,
    KVWrite,
    OutputToken,
    PromptToken,
    TokenCandidate,
    WholeStep,
)
from jaxvllm.explainer.report import Report

HOSTILE = "</script><script>document.title='owned'</script><img src=https://example.org/x onerror=alert(1)>\x1b[31m"


def batch(number: int, num_rows: int, num_decode_rows: int, num_tokens: int) -> WholeStep:
    return WholeStep(0, number, num_rows, num_decode_rows, num_tokens, 16, 8, 0.0125, 0.0003)


def explanation(
    request_id: str, prompt: list[str], steps: tuple[ExplainedStep, ...], *tokens: OutputToken
) -> Explanation:
    return Explanation(
        request_id=request_id,
        prompt=tuple(PromptToken(index, text) for index, text in enumerate(prompt)),
        tokens=tokens,
        steps=steps,
        num_steps_left_out=0,
        page_size=4,
        num_groups=1,
        vocab_size=64,
        finish_reason="length",
        stop_reason=None,
        queued_seconds=0.001,
        first_token_seconds=0.02,
        total_seconds=0.2,
    )


def hostile_report() -> Report:
    """Two requests: a plain one, and one with drafts, a grammar and texts that must never be obeyed."""
    prefill = ExplainedStep(
        "prefill", batch(0, 1, 0, 5), 0, 0, 5, 5, 0, (3, 7), (KVWrite(0, 4, 12), KVWrite(4, 1, 28)), 0, 1,
        admitted=Admitted(0, (3, 7), 0, 0),
    )  # fmt: skip
    decode = ExplainedStep(
        "decode", batch(1, 2, 1, 2), 0, 5, 2, 7, 0, (), (KVWrite(5, 2, 29),), 1, 2,
        decodes=(Decode(5, 6, 2, 1),), num_drafted=3, num_accepted=1,
    )  # fmt: skip
    tokens = [OutputToken(40 + index, text, "sampled") for index, text in enumerate((" a", " b", " c"))]
    tokens[1] = OutputToken(
        41, " b", "draft", (TokenCandidate(41, " b", -0.5, 1), TokenCandidate(42, HOSTILE, -1.5, 2))
    )
    first = explanation("one", ["x", "y", "z", "w", "v"], (prefill, decode), *tokens)
    hit = ExplainedStep(
        "prefill", batch(1, 2, 1, 2), 1, 4, 1, 5, 1, (5,), (KVWrite(4, 1, 20),), 0, 1,
        admitted=Admitted(1, (3, 5), 4, 1), num_allowed=7,
    )  # fmt: skip
    lost = ExplainedStep("decode", batch(2, 1, 1, 1), 1, 5, 1, 6, 0, (), (), 1, 0, is_dropped=True)
    forced = ExplainedStep("forced", batch(3, 1, 0, 2), 1, 5, 2, 7, 0, (), (KVWrite(5, 2, 21),), 1, 2, num_refused=1)
    second = explanation(
        "two",
        ["x", "y", "z", "w", HOSTILE],
        (hit, lost, forced),
        OutputToken(50, HOSTILE, "sampled"),
        OutputToken(51, "\n", "forced"),
        OutputToken(52, None, "sampled"),
    )
    return Report("demo", (" a b c", HOSTILE), (first, second))


def long_explanation() -> Explanation:
    """Returns the explanation of a long prompt and a long answer, too long for any window."""
    num_prompt, num_answer = 300, 120
    pages = tuple(range(3, 3 + (num_prompt + num_answer) // 4))
    write = KVWrite(0, num_prompt, 12)
    prefill = ExplainedStep(
        "prefill", batch(0, 1, 0, num_prompt), 0, 0, num_prompt, num_prompt, 0, pages, (write,), 0, 1,
        admitted=Admitted(0, pages, 0, 0),
    )  # fmt: skip
    decodes = (
        ExplainedStep(
            "decode", batch(index, 1, 1, 1), 0, at, 1, at + 1, 0, (), (KVWrite(at, 1, 12 + at),), index, 1,
            decodes=(Decode(at, at + 1, 0, 0),),
        )
        for index, at in enumerate(range(num_prompt, num_prompt + num_answer - 1), start=1)
    )  # fmt: skip
    tokens = (OutputToken(40 + index, " word", "sampled") for index in range(num_answer))
    return explanation("long", [" word"] * num_prompt, (prefill, *decodes), *tokens)
