"""Measures how many requests and tokens an engine completes in a second, like `vllm bench throughput`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxvllm.bench.drafts import DraftTotals
from jaxvllm.bench.offline.drafts import drafts_between
from jaxvllm.bench.offline.padding import Padding
from jaxvllm.bench.samples import BenchSample
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.ranges import Count, check_ranges

if TYPE_CHECKING:
    from jaxvllm.engine.llm import LLM


@dataclass(frozen=True)
class ThroughputOptions:
    """The number of requests, and what each asks for. Names and defaults are vLLM's."""

    num_prompts: Count = 1000  # requests, all there from the start
    n: Count = 1  # completions of each request
    disable_detokenize: bool = False  # make no text of the tokens

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Throughput:
    """The totals of one run."""

    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    padding: Padding
    drafts: DraftTotals

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def lines(self) -> list[str]:
        """Returns vLLM's lines, one about padding, and one about drafts where there were any."""
        counts = {
            "requests/s": self.num_requests,
            "total tokens/s": self.num_tokens,
            "output tokens/s": self.num_output_tokens,
        }
        return [
            "Throughput: " + ", ".join(f"{count / self.seconds:.2f} {unit}" for unit, count in counts.items()),
            f"Total num prompt tokens:  {self.num_prompt_tokens}",
            f"Total num output tokens:  {self.num_output_tokens}",
            self.padding.line(),
            *([self.drafts.line()] if self.drafts.drafts else []),
        ]

    def record(self) -> dict[str, Any]:
        """Returns the figures under vLLM's keys, and those that it only prints."""
        return {
            "elapsed_time": self.seconds,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_tokens,
            "requests_per_second": self.num_requests / self.seconds,
            "tokens_per_second": self.num_tokens / self.seconds,
            "output_tokens_per_second": self.num_output_tokens / self.seconds,
            "total_prompt_tokens": self.num_prompt_tokens,
            "total_output_tokens": self.num_output_tokens,
            "padding": self.padding.record(),
            **(self.drafts.record() if self.drafts.drafts else {}),
        }


class EngineTokens:
    """The tokens of an engine's own tokenizer, for `Vocabulary`. Raises ValueError when the model has none."""

    def __init__(self, llm: "LLM"):
        self._llm = llm

    def encode(self, text: str) -> list[int]:
        return self._llm.get_tokenizer().encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._llm.get_tokenizer().decode(tokens, skip_special_tokens=False)


def measure_throughput(
    llm: "LLM", samples: Sequence[BenchSample], options: ThroughputOptions, shows_progress: bool = True
) -> Throughput:
    """Completes `samples`, all there from the start, to their full length. Nothing compiles meanwhile."""
    llm.wait_until_compiled()
    prompts: list[Any] = [
        sample.prompt if isinstance(sample.prompt, str) else {"prompt_token_ids": sample.prompt} for sample in samples
    ]
    params = [
        SamplingParams(
            n=options.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=sample.output_len,
            detokenize=not options.disable_detokenize,
        )
        for sample in samples
    ]
    before = llm.engine.stats()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=shows_progress)
    seconds = time.perf_counter() - start
    after = llm.engine.stats()
    return Throughput(
        seconds,
        len(outputs),
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        Padding.between(before, after),
        drafts_between(before, after),
    )
