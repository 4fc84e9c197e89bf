"""Our answers equal those of vLLM itself for every sampling parameter: `make fixtures-vllm` asked it.

Each case has one right answer (see tools/make_vllm_fixtures.py), so tokens, texts and reasons are compared exactly,
and log-probabilities as closely as two implementations of float32 can agree.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxvllm import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from jaxvllm.core.errors import ParameterError, UnsupportedParameterError
from jaxvllm.engine import build
from jaxvllm.engine.outputs import BeamSearchOutput, Logprob
from jaxvllm.text.reasoning import ReasoningFormat
from tests.engine.tiny import one_program
from tests.quick import quick_compilation, quick_engines
from tests.run_cache import run_cache

FIXTURE: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_answers.json").read_text())
CASES: list[dict[str, Any]] = FIXTURE["cases"]
SEARCHES: list[dict[str, Any]] = FIXTURE["beam_searches"]
# Few programs to compile, and fewer rows than cases: most cases begin while others are in the middle.
ENGINE: dict[str, Any] = dict(
    dtype="float32",  # as vLLM had it
    max_model_len=FIXTURE["max_model_len"],
    max_num_seqs=8,
    row_buckets=(8,),
    token_buckets=(64,),
    num_pages=513,
    max_decode_burst=1,
    max_logprobs=-1,
    compilation_cache=run_cache(),
)
ENGINE_OPTIONS = {json.dumps(case["engine"]): case["engine"] for case in CASES}
# Logits are about 10 and differ by 3e-6, and some cases divide them by a temperature of 0.01.
CLOSE = 1e-3
TIE = 2e-5
EOS = 1
type Result = RequestOutput | BeamSearchOutput | ParameterError | UnsupportedParameterError


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick_engines(run_long=True):
        yield


def prompt_of(llm: LLM, case: dict[str, Any]) -> str | list[int]:
    """The prompt as vLLM got it. Where something is cut from it, the text."""
    if isinstance(case["prompt"], str):
        return str(case["prompt"])
    text = llm.get_tokenizer().apply_chat_template(case["prompt"])
    return llm.get_tokenizer().encode(text, add_special_tokens=False)


def sampling_params(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, **case["params"]})


def searches(llm: LLM) -> dict[str, Result]:
    """What the engine finds for the beam searches."""
    return {
        f"search {case['name']}": llm.beam_search(
            [{"prompt_token_ids": case["prompt_token_ids"]}], BeamSearchParams(**case["params"])
        )[0]
        for case in SEARCHES
    }


def answers(llm: LLM, cases: Sequence[dict[str, Any]]) -> dict[str, Result]:
    """What the engine answers when it gets all cases at once, or the error of a case that it refuses."""
    found: dict[str, Result] = {}
    taken = []
    for case in cases:
        try:
            llm.engine.check(case["name"], prompt_of(llm, case), sampling_params(case))
            taken.append(case)
        except (ParameterError, UnsupportedParameterError) as error:
            found[case["name"]] = error
    outputs = llm.generate(
        [prompt_of(llm, case) for case in taken], [sampling_params(case) for case in taken], use_tqdm=False
    )
    return found | {case["name"]: output for case, output in zip(taken, outputs, strict=True)}


@contextmanager
def engine(options: dict[str, Any]) -> Iterator[LLM]:
    """An engine with these options of vLLM's. `reasoning` are the marks that its reasoning parser looks for."""
    with pytest.MonkeyPatch.context() as patch:
        options = dict(options)
        if marks := options.pop("reasoning", None):
            patch.setattr(build, "FORMATS", {"qwen3": ReasoningFormat(*marks)})
            options["reasoning_parser"] = "qwen3"
        with ExitStack() as stack:
            if options:
                # The other engines differ in what is reported of a step, whichever of its programs it runs in. They
                # compute few tokens.
                stack.enter_context(one_program(num_tokens=64))
                stack.enter_context(quick_compilation())
            yield stack.enter_context(LLM("demo", **ENGINE, **options))


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    found: dict[str, Result] = {}
    for key, options in ENGINE_OPTIONS.items():
        with engine(options) as llm:
            found |= answers(llm, [case for case in CASES if json.dumps(case["engine"]) == key])
            if not options:
                found |= searches(llm)
    return found


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_equals_vllm(results: dict[str, Result], case: dict[str, Any]) -> None:
    result = results[case["name"]]
    assert isinstance(result, RequestOutput), result
    assert list(result.prompt_token_ids) == case["prompt_token_ids"]
    assert len(result.outputs) == len(case["outputs"])
    for completion, wanted in zip(result.outputs, case["outputs"], strict=True):
        assert completion.token_ids == wanted["token_ids"]
        assert completion.text == wanted["text"]
        assert (completion.finish_reason, completion.stop_reason) == (wanted["finish_reason"], wanted["stop_reason"])
        compare_logprobs(completion, wanted)
    if "prompt_logprobs" in case:
        assert result.prompt_logprobs is not None
        for ranked, of_token in zip(result.prompt_logprobs, case["prompt_logprobs"], strict=True):
            compare_ranked(ranked, of_token)


@pytest.mark.parametrize("case", SEARCHES, ids=[case["name"] for case in SEARCHES])
def test_a_beam_search_equals_vllms(results: dict[str, Result], case: dict[str, Any]) -> None:
    found = results[f"search {case['name']}"]
    assert isinstance(found, BeamSearchOutput)
    prompt = case["prompt_token_ids"]
    assert [one.tokens for one in found.sequences] == [prompt + one["token_ids"] for one in case["sequences"]]
    for one, wanted in zip(found.sequences, case["sequences"], strict=True):
        assert one.cum_logprob == pytest.approx(wanted["cum_logprob"], abs=CLOSE * len(wanted["token_ids"]))
        # vLLM 0.32 gives no reason at all.
        assert one.finish_reason == ("stop" if wanted["token_ids"][-1] == EOS else "length")


def compare_logprobs(completion: CompletionOutput, wanted: dict[str, Any]) -> None:
    if "logprobs" not in wanted:
        assert completion.logprobs is None
        return
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    for ranked, of_token in zip(completion.logprobs, wanted["logprobs"], strict=True):
        compare_ranked(ranked, of_token)
    assert completion.cumulative_logprob == pytest.approx(
        wanted["cumulative_logprob"], abs=CLOSE * len(completion.token_ids)
    )


def compare_ranked(ranked: dict[int, Logprob] | None, wanted: dict[str, Any] | None) -> None:
    """Compares the log-probabilities of one position: as many tokens, and those of the fixture one by one."""
    if wanted is None:
        assert ranked is None
        return
    assert ranked is not None and len(ranked) == wanted["count"]
    for token, value, rank in wanted["tokens"]:
        if value is None:  # impossible tokens tie, and either engine may report any of them
            assert sum(one.logprob == float("-inf") for one in ranked.values()) > 0
            continue
        one = ranked[token]
        assert one.logprob == pytest.approx(value, abs=CLOSE)
        if rank is not None and one.rank != rank:
            # Far down in a whole vocabulary, tokens are closer to each other than two implementations agree.
            num_ties = sum(abs(other.logprob - one.logprob) < TIE for other in ranked.values()) - 1
            assert rank > 1000 and one.rank is not None and abs(one.rank - rank) <= num_ties
