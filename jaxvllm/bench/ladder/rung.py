"""`Rung`: one idea of LLM serving, on top of all rungs below it, and the engine that has all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jaxvllm.config import EngineConfig


class Way(Enum):
    """The way in which requests go through engines: see `drivers`."""

    RECOMPUTING = "recomputing"
    SERVING = "serving"
    APART = "apart"


@dataclass(frozen=True)
class Rung:
    """An idea, what it is on top of, and where it came from."""

    name: str  # on the command line and in the table
    title: str  # in the picture
    idea: str  # what changes: one sentence
    source: str  # the system or paper that made it known
    limits: str  # when it brings little, which is told where little was measured
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine: of this rung and of all below it
    has_chunks: bool = False  # whether a step's token budget is that of chunks, and not that of whole prompts
    way: Way = Way.SERVING

    @property
    def runs_once(self) -> bool:
        """Whether one run tells enough: it takes so long that neither a first call nor noise matters."""
        return self.way is Way.RECOMPUTING


@dataclass(frozen=True)
class Sizes:
    """The memory and the steps that all rungs have alike. The defaults are for the embedded model on a few cores."""

    max_model_len: int = 1024  # tokens of a request, which nobody knows to be shorter: none has a max_tokens
    max_num_seqs: int = 32  # requests at once, if their KV finds room
    num_pages: int = 385  # with the trash page: 6 requests of full length
    whole_tokens: int = 2048  # the budget of steps that take prompts whole
    chunk_tokens: int = 192  # the budget of steps that take prompts in chunks
    row_buckets: tuple[int, ...] = (8, 16, 32)
    # A prompt of the usual length and the next tokens of all answers fit into 192, and a long prompt into 640.
    token_buckets: tuple[int, ...] = (64, 192, 640, 1280, 2048)

    def config(self, rung: Rung) -> EngineConfig:
        """Returns the config of an engine for `rung`."""
        budget = self.chunk_tokens if rung.has_chunks else self.whole_tokens
        return EngineConfig(
            **{**_WITHOUT_ANY_IDEA, **rung.options},
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            num_pages=self.num_pages,
            max_num_batched_tokens=budget,
            row_buckets=self.row_buckets,
            token_buckets=tuple(size for size in self.token_buckets if size <= budget),
        )


# Float32: the steps of the rungs have different shapes, and with 16 bits their rounding would choose other tokens.
_WITHOUT_ANY_IDEA: Mapping[str, Any] = dict(
    dtype="float32",
    scheduler="static",
    enable_prefix_caching=False,
    max_decode_burst=1,
    async_scheduling=False,
    speculation=False,
    warm_up="full",
)
_DRAFTS = '{"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3}'
_PAGED = dict(scheduler="v1")
_V1 = _PAGED | dict(async_scheduling=True)
_PREFIXES = _V1 | dict(enable_prefix_caching=True)
_BURSTS = _PREFIXES | dict(max_decode_burst=32)
_SPECULATION = _BURSTS | dict(speculation=True, speculative_config=_DRAFTS)

RUNGS = (
    Rung(
        "no-cache",
        "No KV cache",
        "Each new token is computed from the whole text so far.",
        "a model as it is trained",
        "",
        way=Way.RECOMPUTING,
    ),
    Rung(
        "static",
        "KV cache, static batches",
        "Keys and values of earlier tokens are kept, so a step computes one token a request.",
        "FasterTransformer and others",
        "",
    ),
    Rung(
        "continuous",
        "Continuous batching on slots",
        "A request joins as soon as another one ends; each reserves a slot for the longest text.",
        "Orca, 2022",
        "Slots for the longest text are few, so most requests still wait.",
        dict(scheduler="continuous"),
    ),
    Rung(
        "paged",
        "Paged KV",
        "Memory is given out in pages of 16 tokens as a text grows, so more requests run at once.",
        "vLLM, PagedAttention, 2023",
        "More rows in a step need a device that computes them in little more time.",
        _PAGED,
    ),
    Rung(
        "v0",
        "V0: prefill and decode steps",
        "A step computes either prompts or next tokens, and prompts go first.",
        "vLLM V0, 2023",
        "It makes kernels simple, not fast: answers wait while prompts are computed.",
        dict(scheduler="v0"),
    ),
    Rung(
        "chunked",
        "Chunked prefill",
        "A step has few tokens: the next one of each answer, then a piece of a prompt.",
        "Sarathi-Serve, 2024",
        "It makes the longest gaps shorter, not the work: the pieces of a prompt take more steps.",
        _PAGED,
        has_chunks=True,
    ),
    Rung(
        "v1",
        "V1: the host plans ahead",
        "The host plans the next step while the device computes this one.",
        "vLLM V1, 2025",
        "The host has its time to hide only where it has a core for itself.",
        _V1,
        has_chunks=True,
    ),
    Rung(
        "prefix",
        "Prefix caching",
        "Prompts that begin alike share the pages of their beginning, which is computed once.",
        "SGLang, RadixAttention, 2023",
        "It shortens prompts, so it brings little where answers take most of the time.",
        _PREFIXES,
        has_chunks=True,
    ),
    Rung(
        "bursts",
        "Decode bursts",
        "While no request waits, one call takes several decode steps, up to 4 ms of them.",
        "multi-step scheduling, vLLM 0.6, 2024",
        "It saves the host's time for a step, which counts where steps are short.",
        _BURSTS,
        has_chunks=True,
    ),
    Rung(
        "speculation",
        "Speculation",
        "A small head guesses three tokens, and the model checks all of them in one step.",
        "Leviathan et al., 2022; EAGLE-3, 2025",
        "Guesses cost computation, so on a CPU they pay only while few requests run.",
        _SPECULATION,
        has_chunks=True,
    ),
    Rung(
        "apart",
        "Prefill and decode apart",
        "One engine computes prompts; requests move with their KV to a second one for answers.",
        "DistServe, Splitwise, 2024",
        "It is for two machines. Here both engines share one, and moving costs time: nothing can be won.",
        _SPECULATION,
        has_chunks=True,
        way=Way.APART,
    ),
)


def chosen_rungs(names: Sequence[str]) -> tuple[Rung, ...]:
    """Returns the rungs with these names from the lowest to the highest, or all if there are none.

    Raises ValueError for an unknown name.
    """
    known = [rung.name for rung in RUNGS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--rungs takes {','.join(known)}, not {unknown[0]!r}")
    return tuple(rung for rung in RUNGS if rung.name in names or not names)
