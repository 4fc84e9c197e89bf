"""Writes tests/engine/vllm_answers.json: what vLLM itself answers with the embedded model, parameter by parameter.

`make fixtures-vllm` runs it in an environment of its own, with vLLM's build for CPUs. Everything is float32 and
eager, and every case has only one right answer: it is greedy, or its filters leave one token. `margin` is the least
distance between the two best logits of a case, after all that changes them. No case is written whose margin is so small
that rounding could decide.

Two answers of vLLM are left out because they are mistakes. Its guidance backend lets a structural tag hold any JSON,
whatever the schema of the tag says. And it counts the tokens of reasoning from the wrong place where the mark that
begins the reasoning has several tokens.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes 25 s, and saves nothing here
}

import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.sampling_params import (  # noqa: E402
    BeamSearchParams,
    RepetitionDetectionParams,
    StructuredOutputsParams,
)

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "jaxvllm" / "assets" / "demo"
FILE = ROOT / "tests" / "engine" / "vllm_answers.json"
MAX_MODEL_LEN = 512
# Two tokens whose logits are closer than this could swap by rounding alone.
MIN_MARGIN = 1e-3
# Of longer lists of log-probabilities, only the best ones and every 64th token are kept.
MAX_KEPT = 48

STORY = "Once upon a time"
FRANCE = "The capital of France"
FOXES = "The fox saw the fox, and the fox saw the other fox. Then the fox"
COUNT = "One day, one day, one day,"
LONG = "Tom and Lily lived in a farmhouse. " * 52
EOS = 1
COMMA, PERIOD, PARIS, THE, AND = 18, 20, 1915, 265, 317

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANIMALS = {
    "type": "object",
    "properties": {
        "animals": {"type": "array", "items": {"enum": ["fox", "owl", "bear"]}, "minItems": 2, "maxItems": 3},
        "wild": {"type": "boolean"},
    },
    "required": ["animals", "wild"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "the " animal (" and the " animal)? "."\nanimal: "fox" | "owl" | "bear"\n'


@dataclass(frozen=True)
class Case:
    """One request, with parameters as JSON would give them."""

    name: str
    prompt: str | list[dict[str, str]]  # a text, or messages
    params: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)  # options of the engine


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def cases() -> list[Case]:
    made = [
        Case("greedy", STORY, {"max_tokens": 48}),
        Case("greedy-short", FRANCE, {}),
        Case("greedy-until-eos", user("What is the capital of France?"), {"max_tokens": 40}),
        Case("greedy-until-the-model-is-full", LONG, {"max_tokens": None}),
    ]
    for value in (0.5, 0.8, 1.05, 1.3, 2.0, 10.0):
        made.append(Case(f"repetition_penalty-{value}", FRANCE, {"repetition_penalty": value, "max_tokens": 32}))
        made.append(Case(f"repetition_penalty-{value}-foxes", FOXES, {"repetition_penalty": value}))
    for value in (-2.0, -0.5, 0.3, 1.0, 2.0):
        made.append(Case(f"presence_penalty-{value}", FRANCE, {"presence_penalty": value, "max_tokens": 32}))
        made.append(Case(f"frequency_penalty-{value}", FRANCE, {"frequency_penalty": value, "max_tokens": 32}))
        made.append(Case(f"frequency_penalty-{value}-count", COUNT, {"frequency_penalty": value, "max_tokens": 32}))
    made += [
        Case(
            "all-penalties",
            FRANCE,
            {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.7, "max_tokens": 40},
        ),
        Case("penalties-do-not-see-the-prompt", FOXES, {"presence_penalty": 2.0, "frequency_penalty": 2.0}),
        Case("penalties-with-negative-signs", COUNT, {"presence_penalty": -1.0, "repetition_penalty": 0.8}),
        Case("logit_bias-for", FRANCE, {"logit_bias": {str(AND): 8.5, str(COMMA): 3.0}}),
        Case("logit_bias-against", FRANCE, {"logit_bias": {"322": -100, str(PARIS): -7.25}}),
        Case("logit_bias-beyond-the-limit", STORY, {"logit_bias": {str(PERIOD): 100.0}, "max_tokens": 5}),
        Case("logit_bias-for-eos", STORY, {"logit_bias": {str(EOS): 12.0}, "max_tokens": 32}),
        Case("logit_bias-before-penalties", FOXES, {"logit_bias": {str(THE): 6.0}, "repetition_penalty": 1.7}),
        Case("allowed_token_ids", STORY, {"allowed_token_ids": list(range(200, 900, 3))}),
        Case("allowed_token_ids-one", STORY, {"allowed_token_ids": [PERIOD], "max_tokens": 4}),
        Case(
            "allowed_token_ids-with-bias",
            STORY,
            {"allowed_token_ids": [THE, AND, COMMA, PERIOD], "logit_bias": {str(AND): 5}},
        ),
        Case(
            "allowed_token_ids-with-penalties",
            STORY,
            {"allowed_token_ids": [THE, AND, COMMA, PERIOD], "frequency_penalty": 1.5},
        ),
        Case("bad_words-one-token", FRANCE, {"bad_words": ["is"]}),
        Case("bad_words-several-tokens", STORY, {"bad_words": ["Lola", "young painter"], "max_tokens": 32}),
        Case("bad_words-with-space", STORY, {"bad_words": [" a young", "there was"], "max_tokens": 32}),
        Case("bad_words-of-the-prompt", COUNT, {"bad_words": ["one day", "day, one"], "max_tokens": 24}),
        Case(
            "bad_words-with-penalties",
            FOXES,
            {"bad_words": ["farmer", "horse"], "repetition_penalty": 1.1, "max_tokens": 32},
        ),
        Case("min_tokens", user("What is the capital of France?"), {"min_tokens": 24, "max_tokens": 40}),
        Case("min_tokens-with-stop-token", FRANCE, {"min_tokens": 10, "stop_token_ids": [PERIOD], "max_tokens": 40}),
        Case("min_tokens-with-stop", STORY, {"min_tokens": 12, "stop": ["a"], "max_tokens": 40}),
        Case(
            "min_tokens-with-ignore_eos",
            user("What is 2 + 3?"),
            {"min_tokens": 20, "ignore_eos": True, "max_tokens": 30},
        ),
        Case("stop", STORY, {"stop": ["called"], "max_tokens": 40}),
        Case("stop-inside-a-token", STORY, {"stop": ["ainte"], "max_tokens": 40}),
        Case("stop-across-tokens", STORY, {"stop": ["young painter called L"], "max_tokens": 40}),
        Case(
            "stop-included", STORY, {"stop": ["called", "lived"], "include_stop_str_in_output": True, "max_tokens": 40}
        ),
        Case("stop-of-several", STORY, {"stop": ["zebra", "lived in", "Lola"], "max_tokens": 40}),
        Case("stop_token_ids", FRANCE, {"stop_token_ids": [PERIOD], "max_tokens": 40}),
        Case(
            "stop_token_ids-included", FRANCE, {"stop_token_ids": [PERIOD, PARIS], "include_stop_str_in_output": True}
        ),
        Case("stop_token_ids-eos", user("What is the capital of France?"), {"stop_token_ids": [EOS], "max_tokens": 40}),
        Case("ignore_eos", user("What is the capital of France?"), {"ignore_eos": True, "max_tokens": 24}),
        Case(
            "ignore_eos-with-special-tokens",
            user("What is the capital of France?"),
            {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 24},
        ),
        Case("detokenize-off", STORY, {"detokenize": False}),
        Case("logprobs-0", STORY, {"logprobs": 0, "max_tokens": 8}),
        Case("logprobs-5", STORY, {"logprobs": 5, "max_tokens": 8}),
        Case("logprobs-40", STORY, {"logprobs": 40, "max_tokens": 3}),
        Case("logprobs-all", STORY, {"logprobs": -1, "max_tokens": 3}),
        Case("logprob_token_ids", STORY, {"logprob_token_ids": [PARIS, 7, COMMA], "max_tokens": 4}),
        Case(
            "logprobs-are-raw",
            FOXES,
            {"logprobs": 3, "repetition_penalty": 1.5, "logit_bias": {str(THE): 4.0}, "max_tokens": 8},
        ),
        Case("prompt_logprobs-0", FRANCE, {"prompt_logprobs": 0, "max_tokens": 2}),
        Case("prompt_logprobs-3", FOXES, {"prompt_logprobs": 3, "max_tokens": 2}),
        Case("prompt_logprobs-all", FRANCE, {"prompt_logprobs": -1, "max_tokens": 1}),
        Case(
            "prompt_logprobs-with-penalties", FOXES, {"prompt_logprobs": 2, "repetition_penalty": 2.0, "max_tokens": 6}
        ),
        Case("greedy-ignores-filters", STORY, {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.4}),
        Case("top_k-1", STORY, {"temperature": 0.9, "top_k": 1, "seed": 1}),
        Case("top_p-of-one-token", STORY, {"temperature": 0.9, "top_p": 1e-6, "seed": 2}),
        Case("min_p-1", STORY, {"temperature": 1.5, "min_p": 1.0, "seed": 3}),
        Case("top_k-1-with-penalties", FOXES, {"temperature": 1.2, "top_k": 1, "seed": 4, "repetition_penalty": 1.3}),
        Case("n-3", FRANCE, {"temperature": 1.0, "top_k": 1, "n": 3, "seed": 5, "logprobs": 1, "max_tokens": 6}),
        Case("n-2-with-penalties", FOXES, {"temperature": 1.0, "top_k": 1, "n": 2, "presence_penalty": 1.0}),
        Case(
            "repetition_detection",
            COUNT,
            {
                "repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 3},
                "logit_bias": {str(COMMA): 9.0},
                "max_tokens": 48,
            },
        ),
        Case(
            "repetition_detection-after-min_tokens",
            COUNT,
            {
                "repetition_detection": {"max_pattern_size": 2, "min_count": 4},
                "allowed_token_ids": [COMMA],
                "min_tokens": 9,
                "max_tokens": 40,
            },
        ),
        Case(
            "repetition_detection-finds-none", STORY, {"repetition_detection": {"max_pattern_size": 4, "min_count": 5}}
        ),
        Case("truncate_prompt_tokens", FOXES, {"truncate_prompt_tokens": 5}),
        Case("truncate_prompt_tokens-beyond", FRANCE, {"truncate_prompt_tokens": 100}),
        Case("truncate_prompt_tokens-1", FOXES, {"truncate_prompt_tokens": 1}),
        Case("skip_reading_prefix_cache", STORY, {"skip_reading_prefix_cache": True}),
        Case(
            "everything-at-once",
            FOXES,
            {
                "repetition_penalty": 1.15,
                "presence_penalty": 0.2,
                "frequency_penalty": 0.3,
                "logit_bias": {str(THE): 2.0, "322": -3.0},
                "bad_words": ["forest", "the owl"],
                "min_tokens": 12,
                "stop": ["zebra"],
                "stop_token_ids": [PERIOD],
                "logprobs": 2,
                "prompt_logprobs": 1,
                "max_tokens": 40,
            },
        ),
    ]
    for name, form in (
        ("json", {"json": PERSON}),
        ("json-enum", {"json": ANIMALS}),
        ("json_object", {"json_object": True}),
        ("regex", {"regex": "[A-Z][a-z]{2,5} is [0-9]{1,2} years old\\."}),
        ("choice", {"choice": ["Berlin", "Paris", "Rome and Milan"]}),
        ("grammar", {"grammar": GRAMMAR}),
    ):
        made.append(
            Case(
                f"structured-{name}",
                user("What is the capital of France?"),
                {"structured_outputs": form, "max_tokens": 48},
            )
        )
    forms = {"structured_outputs": {"json": PERSON}, "max_tokens": 48}
    made += [
        Case("structured-with-penalties", STORY, forms | {"repetition_penalty": 1.2, "frequency_penalty": 0.4}),
        Case("structured-with-bias", STORY, forms | {"logit_bias": {"31": 100.0, "30": 90.0}}),
        Case("structured-with-logprobs", FRANCE, {"structured_outputs": {"choice": ["blue", "green"]}, "logprobs": 3}),
        Case("structured-with-min_tokens", FRANCE, {"structured_outputs": {"regex": "[a-z]{1,40}"}, "min_tokens": 6}),
        Case(
            "structured-with-stop",
            STORY,
            {"structured_outputs": {"regex": "[a-z ]{30,60}"}, "stop": ["the"], "max_tokens": 30},
        ),
        Case("structured-cut-short", STORY, {"structured_outputs": {"json": PERSON}, "max_tokens": 6}),
        Case(
            "structured-with-bad_words",
            STORY,
            {"structured_outputs": {"choice": ["the fox", "the owl", "the bear"]}, "bad_words": ["fox", "bear"]},
        ),
    ]
    # Marks that are one token each: with longer ones, vLLM counts the budget from another place.
    thinks = {"reasoning": ("<tool_call>", "</tool_call>")}
    for budget in (0, 1, 6):
        asked = {"thinking_token_budget": budget, "max_tokens": 24}
        made.append(Case(f"thinking_token_budget-{budget}", STORY + "<tool_call>", asked, thinks))
    made += [
        Case("thinking_token_budget-without-reasoning", STORY, {"thinking_token_budget": 2}, thinks),
        Case("thinking_token_budget-off", STORY + "<tool_call>", {"thinking_token_budget": -1}, thinks),
    ]
    for mode in ("processed_logprobs", "raw_logits", "processed_logits"):
        options = {"logprobs_mode": mode}
        params = {"logprobs": 3, "repetition_penalty": 1.5, "logit_bias": {str(THE): 4.0}, "max_tokens": 8}
        made += [
            Case(f"{mode}-greedy", FOXES, params, options),
            Case(f"{mode}-sampled", FOXES, params | {"temperature": 0.7, "top_k": 1, "seed": 1}, options),
            Case(
                f"{mode}-top_k-2",
                STORY,
                {"logprobs": 3, "temperature": 0.01, "top_k": 2, "seed": 1, "max_tokens": 4},
                options,
            ),
            Case(
                f"{mode}-of-the-prompt",
                FOXES,
                {"prompt_logprobs": 2, "repetition_penalty": 1.5, "max_tokens": 2},
                options,
            ),
            Case(f"{mode}-all", STORY, {"logprobs": -1, "bad_words": ["there"], "max_tokens": 2}, options),
            Case(
                f"{mode}-of-tokens",
                STORY,
                {"logprob_token_ids": [PARIS, 7, COMMA], "presence_penalty": 1.0, "max_tokens": 4},
                options,
            ),
        ]
    return made


BEAMS: list[Case] = [
    Case("width-1", STORY, {"beam_width": 1, "max_tokens": 12}),
    Case("width-2", STORY, {"beam_width": 2, "max_tokens": 12}),
    Case("width-4", FRANCE, {"beam_width": 4, "max_tokens": 16}),
    Case("width-4-until-eos", user("What is the capital of France?"), {"beam_width": 4, "max_tokens": 24}),
    Case("length_penalty-0", user("Tell me about a fox."), {"beam_width": 3, "max_tokens": 24, "length_penalty": 0.0}),
    Case("length_penalty-2", user("Tell me about a fox."), {"beam_width": 3, "max_tokens": 24, "length_penalty": 2.0}),
    Case("ignore_eos", user("What is the capital of France?"), {"beam_width": 3, "max_tokens": 16, "ignore_eos": True}),
]


def start(options: Mapping[str, Any]) -> LLM:
    """Starts an engine. There may be one at a time: it lives as long as the function that called this."""
    chosen = dict(options)
    if marks := chosen.pop("reasoning", None):
        chosen["reasoning_config"] = {"reasoning_start_str": marks[0], "reasoning_end_str": marks[1]}
    return LLM(
        str(MODEL),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_logprobs=-1,
        structured_outputs_config={"backend": "guidance"},
        **chosen,
    )


def prompt_of(llm: LLM, case: Case) -> dict[str, Any]:
    """Returns the prompt as tokens, or as text where vLLM itself is to cut it."""
    if isinstance(case.prompt, str):
        return {"prompt": case.prompt}
    text = llm.get_tokenizer().apply_chat_template(case.prompt, tokenize=False, add_generation_prompt=True)
    return {"prompt_token_ids": llm.get_tokenizer().encode(text, add_special_tokens=False)}


def prompt_ids(llm: LLM, case: Case) -> list[int]:
    prompt = prompt_of(llm, case)
    tokens: list[int] = prompt.get("prompt_token_ids") or llm.get_tokenizer().encode(prompt["prompt"])
    return tokens


def generate(llm: LLM, wanted: list[Case], params: list[SamplingParams]) -> list[Any]:
    """Returns the outputs in order.

    Truncation is an argument of the call in vLLM. And where one request of a batch has `logprob_token_ids`, the others
    lose their own log-probabilities.
    """
    found: list[Any] = [None] * len(wanted)
    kinds = [(case.params.get("truncate_prompt_tokens"), "logprob_token_ids" in case.params) for case in wanted]
    for kind in dict.fromkeys(kinds):
        kept_tokens = kind[0]
        indices = [i for i, other in enumerate(kinds) if other == kind]
        outputs = llm.generate(
            [prompt_of(llm, wanted[i]) for i in indices],
            [params[i] for i in indices],
            use_tqdm=False,
            tokenization_kwargs=None if kept_tokens is None else {"truncate_prompt_tokens": kept_tokens},
        )
        for i, output in zip(indices, outputs, strict=True):
            found[i] = output
    return found


def sampling_params(params: Mapping[str, Any]) -> SamplingParams:
    chosen = {"temperature": 0.0, **params}
    chosen.pop("truncate_prompt_tokens", None)
    if "logit_bias" in chosen:
        chosen["logit_bias"] = {int(token): bias for token, bias in chosen["logit_bias"].items()}
    for name, kind in (
        ("structured_outputs", StructuredOutputsParams),
        ("repetition_detection", RepetitionDetectionParams),
    ):
        if name in chosen:
            chosen[name] = kind(**chosen[name])
    return SamplingParams(**chosen)


def kept(ranked: Mapping[int, Any] | None, has_ranks: bool = True) -> dict[str, Any] | None:
    """Returns log-probabilities of one position as [token, value, rank], fewer if there are many.

    With `logprob_token_ids` vLLM has no ranks: it tells the places of the tokens in that list.
    """
    if ranked is None:
        return None
    rows: list[list[Any]] = [
        [token, None if one.logprob == float("-inf") else round(one.logprob, 5), one.rank if has_ranks else None]
        for token, one in ranked.items()
    ]
    if len(rows) > MAX_KEPT:
        rows = [row for row in rows if row[0] % 64 == 0 or (row[2] or 0) in range(1, 5)]
    return {"count": len(ranked), "tokens": rows}


def margin_of(output: Any) -> float:
    """Returns the least distance between the two best tokens of any step."""
    least = float("inf")
    for completion in output.outputs:
        for ranked in completion.logprobs:
            best = sorted((one.logprob for one in ranked.values()), reverse=True)[:2]
            least = min(least, best[0] - best[1])
    return least


def margins(wanted: list[Case]) -> dict[str, float]:
    """Returns the margin of every case, from log-probabilities as they are when a token is chosen."""
    llm = start({**wanted[0].engine, "logprobs_mode": "processed_logprobs"})
    params = []
    for case in wanted:
        changed = {name: value for name, value in case.params.items() if name not in ("logprobs", "logprob_token_ids")}
        # Filters that leave one token would leave no second best, and change no order.
        changed = {
            name: value for name, value in changed.items() if name not in ("top_k", "top_p", "min_p", "seed", "n")
        }
        params.append(sampling_params(changed | {"temperature": 0.0, "logprobs": 2}))
    outputs = generate(llm, wanted, params)
    return {case.name: margin_of(output) for case, output in zip(wanted, outputs, strict=True)}


def record(case: Case, output: Any, margin: float) -> dict[str, Any]:
    outputs = []
    for completion in output.outputs:
        made = {
            "token_ids": list(completion.token_ids),
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            has_ranks = "logprob_token_ids" not in case.params
            made["logprobs"] = [kept(ranked, has_ranks) for ranked in completion.logprobs]
            made["cumulative_logprob"] = round(completion.cumulative_logprob, 5)
        outputs.append(made)
    made = {
        "name": case.name,
        "engine": dict(case.engine),
        "prompt": case.prompt,
        "params": dict(case.params),
        "prompt_token_ids": list(output.prompt_token_ids),
        "margin": None if margin == float("inf") else round(margin, 5),
        "outputs": outputs,
    }
    if output.prompt_logprobs is not None:
        made["prompt_logprobs"] = [kept(ranked) for ranked in output.prompt_logprobs]
    return made


def records(wanted: list[Case], least: Mapping[str, float]) -> list[dict[str, Any]]:
    """Returns what one engine answers to cases that all need it."""
    llm = start(wanted[0].engine)
    outputs = generate(llm, wanted, [sampling_params(case.params) for case in wanted])
    return [record(case, output, least[case.name]) for case, output in zip(wanted, outputs, strict=True)]


def beam_records() -> list[dict[str, Any]]:
    llm = start({})
    made = []
    for case in BEAMS:
        prompt = {"prompt_token_ids": prompt_ids(llm, case)}
        [found] = llm.beam_search([prompt], BeamSearchParams(**case.params))
        made.append(
            {
                "name": case.name,
                "prompt": case.prompt,
                "params": dict(case.params),
                "prompt_token_ids": prompt["prompt_token_ids"],
                "sequences": [
                    {
                        "token_ids": list(one.tokens[len(prompt["prompt_token_ids"]) :]),
                        "cum_logprob": round(one.cum_logprob, 5),
                        "finish_reason": one.finish_reason,
                        "stop_reason": one.stop_reason,
                    }
                    for one in found.sequences
                ],
            }
        )
    return made


def main() -> None:
    argparse.ArgumentParser(description="Writes tests/engine/vllm_answers.json from vLLM.").parse_args()
    wanted = cases()
    least = margins([case for case in wanted if "reasoning" not in case.engine])
    least |= margins([case for case in wanted if "reasoning" in case.engine])
    close = {name: margin for name, margin in least.items() if margin < MIN_MARGIN}
    if close:
        raise SystemExit(f"rounding could decide these cases, so choose others: {close}")
    made = []
    for options in dict.fromkeys(tuple(case.engine.items()) for case in wanted):
        made += records([case for case in wanted if tuple(case.engine.items()) == options], least)
    beams = beam_records()
    # One case a line: a difference then shows which case changed.
    lines = ",\n".join(json.dumps(one) for one in made)
    searches = ",\n".join(json.dumps(one) for one in beams)
    head = f'"vllm": {json.dumps(vllm.__version__)}, "max_model_len": {MAX_MODEL_LEN}'
    FILE.write_text(f'{{{head}, "cases": [\n{lines}\n], "beam_searches": [\n{searches}\n]}}\n')
    print(f"{len(made)} cases, {len(beams)} beam searches, {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
