"""`explain` completes prompts and returns a `Report` of what the engine did, which prints and draws itself."""

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from jaxvllm.core.explanation import Explanation
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.explainer import text
from jaxvllm.explainer.page import page
from jaxvllm.explainer.timeline import notes

if TYPE_CHECKING:
    from jaxvllm.engine.llm import LLM
    from jaxvllm.engine.outputs import RequestOutput

CANDIDATES = 5  # of each token
WIDTH = 140  # characters, where there is no terminal


@dataclass(frozen=True)
class Report:
    """The work of an engine for some prompts. `str()` prints it, a notebook draws it, `to_json` keeps it."""

    model: str
    texts: tuple[str, ...]  # the completions
    explanations: tuple[Explanation, ...]  # of the same completions

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.explanations):
            raise ValueError(f"{len(self.texts)} texts for {len(self.explanations)} explanations: give one for each")

    def __str__(self) -> str:
        out = io.StringIO()
        self.print(Console(file=out, width=WIDTH, color_system=None))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def print(self, console: Console) -> None:
        """Prints it on a terminal, or wherever `console` writes."""
        console.print(text.report(self.explanations, self.texts), soft_wrap=False)

    @cached_property
    def html(self) -> str:
        """The report as one HTML page, which loads nothing."""
        shown = {"report": self, "notes": notes(self.explanations)}
        return page(msgspec.json.encode(shown), fallback=str(self))

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the page in a frame of its own."""
        return f'<iframe srcdoc="{html.escape(self.html)}" style="width: 100%; height: 40rem; border: 0"></iframe>'

    def to_json(self) -> bytes:
        """Returns it as JSON, which `from_json` reads."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> "Report":
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        return msgspec.json.decode(data, type=cls)


def explain(
    llm: "LLM",
    prompts: str | Sequence[str],
    sampling_params: SamplingParams | None = None,
    *,
    candidates: int | None = CANDIDATES,
    add_special_tokens: bool = True,
) -> Report:
    """Completes prompts in one batch and returns what the engine did.

    `candidates`: how many of the most probable tokens are told at each place, for which the request asks for
    log-probabilities unless it does anyhow. None: none are told. Then a grammar may force tokens, and rows may guess
    what it allows, as in a request without log-probabilities. Raises ValueError for what `LLM.generate` would refuse.
    """
    params = llm.get_default_sampling_params() if sampling_params is None else sampling_params
    logprobs = candidates if params.logprobs is None else params.logprobs
    params = replace(params, logprobs=logprobs, output_kind=RequestOutputKind.FINAL_ONLY)
    texts = [prompts] if isinstance(prompts, str) else prompts
    requests = [
        llm.engine.check(f"explain-{index}", one, params, add_special_tokens=add_special_tokens, wants_explanation=True)
        for index, one in enumerate(texts)
    ]
    outputs = _complete(llm, requests)
    completions = [one for request in requests for one in outputs[request.request_id].outputs]
    found = tuple(one.explanation for one in completions if one.explanation is not None)
    return Report(llm.config.model, tuple(one.text for one in completions), found)


def _complete(llm: "LLM", requests: Sequence[GenerationRequest]) -> dict[str, "RequestOutput"]:
    engine, outputs = llm.engine, dict[str, "RequestOutput"]()
    try:
        for request in requests:
            engine.submit(request)
        while len(outputs) < len(requests):
            outputs |= {one.request_id: one for one in engine.step() if one.finished}
    finally:
        for request in requests:
            engine.abort(request.request_id)
    return outputs
