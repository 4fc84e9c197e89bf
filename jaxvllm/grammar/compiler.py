"""`GrammarCompiler`: turns what requests ask for into grammars, in threads of its own, each at most once."""

import logging
import re
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import chain, takewhile
from queue import SimpleQueue
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from jaxvllm.core.errors import OverloadedError, ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar.cache import GrammarCache
from jaxvllm.grammar.constraint import CompiledGrammar, one_line
from jaxvllm.grammar.json_schema import TOO_HARD, first_named, forgotten, keyword_at, read_schema, unenforced
from jaxvllm.grammar.matcher import STACK_BYTES, first_forced, first_mask, new_matcher, new_tokens
from jaxvllm.grammar.source import grammar_source
from jaxvllm.grammar.trial_process import TrialSettings
from jaxvllm.grammar.trials import Trial, Trials
from jaxvllm.grammar.vocabulary import GrammarVocabulary
from jaxvllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_THREADS = 2
# The size of the stacks of new threads is one of the whole process, which may have several engines.
_STACK_SIZE = threading.Lock()
# From this many tokens on a tokenizer is built while no request runs, if there is such a time before the first request
# asks: llguidance holds the GIL all the while, 0.9 s for 128k tokens, in which no step is planned.
LARGE_VOCABULARY = 2**15
# A grammar may compute for so long, and for so long while others wait for a place to be tried. No schema of the
# public suites takes a third of a second.
COMPILE_SECONDS = 10.0
CROWDED_SECONDS = 1.0
# A grammar may take so much memory: schemas with 1000 properties take 4 MB, and the largest that are allowed 45.
GRAMMAR_BYTES = 2**27


class GrammarCompiler:
    """Compiles `StructuredOutputsParams` for one tokenizer. Threads may share it.

    Equal parameters are compiled once, as long as the result is in the cache. Each grammar is tried in another process
    first: what takes too long or too much memory there, or crashes, is refused and never compiled here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        seconds: float = COMPILE_SECONDS,
        crowded_seconds: float = CROWDED_SECONDS,
        cache: GrammarCache | None = None,
    ):
        """Takes the model's `vocab_size`. Nothing is built before `warm_up` or the first request."""
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = eos_token_ids
        self.seconds = seconds
        self.crowded_seconds = min(crowded_seconds, seconds)
        self.cache = cache or GrammarCache()
        self.trials = Trials(self._settings)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None ends a thread
        self._lock = threading.Lock()  # of the number of threads
        self._num_threads = 0
        self._is_closed = False
        self._building = threading.Lock()

    def warm_up(self) -> None:
        """Builds the tokenizer in the background, here and in the other process, if its vocabulary is large.

        No step is planned meanwhile, so no request should run. It is for later forms alone, so a failure is logged.
        """
        if self._vocab_size >= LARGE_VOCABULARY:
            try:
                self._submit(self.trials.start)
                self._submit(lambda: None if self._tokens else None)
            except Exception:  # such as a system that lacks the memory of another thread
                logger.exception("structured outputs are not prepared; the first form that needs them tries again")

    def compile(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """Returns the grammar of `params`, as soon as it is compiled. Takes no time itself.

        Its error is a ParameterError, or an OverloadedError if the same parameters may compile later.
        """
        future, is_new = self.cache.get_or_add(params)
        if is_new:
            self._submit_for(params, future, lambda: self._try(params, future))
        return future

    def close(self) -> None:
        """Ends the threads after what they compile, and the other process.

        What is compiled afterwards has an OverloadedError.
        """
        with self._lock:
            self._is_closed = True
            for _ in range(self._num_threads):
                self._jobs.put(None)
        self.trials.close()

    def _submit(self, job: Callable[[], None]) -> None:
        """Has one of the threads do `job`. Raises OverloadedError once closed, and where no thread can start."""
        with self._lock:  # to the end, or a job might come after the None that ends the threads
            if self._is_closed:
                raise OverloadedError("structured_outputs: the engine is closed: build another")
            if self._num_threads < NUM_THREADS:
                try:
                    self._start_thread()
                except Exception as error:
                    if not self._num_threads:
                        raise OverloadedError(f"structured_outputs: {error}: try again later") from error
                    logger.exception("structured outputs go on with fewer threads")
            self._jobs.put(job)

    def _start_thread(self) -> None:
        with _STACK_SIZE:
            before = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=self._work, name="jaxvllm-grammar", daemon=True).start()
            finally:
                threading.stack_size(before)
        self._num_threads += 1

    def _submit_for(
        self, params: StructuredOutputsParams, future: Future[CompiledGrammar], job: Callable[[], None]
    ) -> None:
        """Has one of the threads do a part of the work for `future`. If that fails, the future does."""

        def guarded() -> None:
            try:
                job()
            except BaseException as error:
                self._fail(params, future, error)

        try:
            self._submit(guarded)
        except Exception as error:
            self._fail(params, future, error)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # the thread is needed for others; a panic of llguidance is a BaseException
                logger.exception(
                    "a part of what structured outputs need failed; the next form that needs it tries again"
                )

    def _try(self, params: StructuredOutputsParams, future: Future[CompiledGrammar]) -> None:
        """Has a grammar tried, and then compiled in one of the threads, unless it is wrong already."""
        source = grammar_source(params, self._vocabulary)

        def finish(trial: Future[Trial]) -> None:
            self._submit_for(params, future, lambda: self._finish(params, source, trial.result(), future))

        self.trials.run(source).add_done_callback(finish)

    def _finish(
        self, params: StructuredOutputsParams, source: str, trial: Trial, future: Future[CompiledGrammar]
    ) -> None:
        self._check(trial)
        self.cache.reserve(trial.num_bytes)
        try:
            grammar = self._compile(params, source)
        except BaseException:
            self.cache.release(trial.num_bytes)
            raise
        self.cache.store(params, future, grammar, trial.num_bytes)

    def _fail(self, params: StructuredOutputsParams, future: Future[CompiledGrammar], error: BaseException) -> None:
        """Sets the error of a grammar."""
        match error:
            case OverloadedError():
                self.cache.forget(params, future)  # the next time may be better
                future.set_exception(error)
            case MemoryError() | OSError():
                logger.error("the system lacks what a grammar needs", exc_info=error)
                self.cache.forget(params, future)
                future.set_exception(OverloadedError(f"structured_outputs: {one_line(str(error))}: try again later"))
            case ParameterError():
                future.set_exception(ParameterError(f"structured_outputs: {error}", "structured_outputs"))
            case _:  # a panic of llguidance is a BaseException
                logger.error("a grammar could not be compiled", exc_info=error)
                reason = one_line(str(error)) or type(error).__name__
                future.set_exception(
                    ParameterError(f"structured_outputs: it cannot be compiled: {reason}", "structured_outputs")
                )

    def _check(self, trial: Trial) -> None:
        """Raises the error of a grammar that did not pass its trial."""
        match trial.end:
            case "late":
                raise ParameterError(f"it took longer than {self.seconds:g} s to compile: make the grammar smaller")
            case "crowded":
                raise OverloadedError(
                    f"structured_outputs: it took longer than {self.crowded_seconds:g} s to compile while other "
                    "grammars waited: make the grammar smaller, or try again later"
                )
            case "lost":
                raise OverloadedError("structured_outputs: compiling was interrupted: try again")
            case "died" if trial.signal == signal.SIGABRT:  # so a Rust program ends when there is no memory
                raise ParameterError(
                    f"it needs more than {GRAMMAR_BYTES // 2**20} MB of memory to compile: make the grammar smaller"
                )
            case "died":
                how = f" ({signal.strsignal(trial.signal)})" if trial.signal else ""
                raise ParameterError(f"the library that compiles grammars crashed on it{how}: change the grammar")

    def _compile(self, params: StructuredOutputsParams, source: str) -> CompiledGrammar:
        name = params.kind
        matcher = new_matcher(self._tokens, source)
        if error := matcher.get_error():
            raise _explained(error, params)
        warnings = [one_line(warning) for warning in matcher.get_grammar_warnings()]
        if name == "json":
            assert params.json is not None
            warnings, refused = _not_enforced(warnings, read_schema(params.json, name), params)
        else:
            refused = [] if params.lenient else warnings
        if refused:
            shown = "; ".join(first_named(refused))
            raise ParameterError(
                f"{name} has what cannot be enforced ({shown}): leave it out, or {params.way_out}",
                "structured_outputs",
            )
        mask = np.frombuffer(first_mask(matcher, self._tokens), np.int32)
        eos = frozenset(self._eos_token_ids)
        forced = tuple(takewhile(lambda token: token not in eos, first_forced(matcher)))
        if (error := matcher.get_error()) or not mask.any() or (matcher.is_stopped() and not matcher.is_accepting()):
            reason = f" ({one_line(error)})" if error else ""
            raise ParameterError(f"no text satisfies {name}{reason}: correct it", "structured_outputs")
        if matcher.deep_copy().try_consume_tokens(list(forced)) != len(forced):
            raise ParameterError(f"no tokens spell what {name} begins with: correct it", "structured_outputs")
        return CompiledGrammar(matcher, mask, forced, tuple(warnings), eos)

    @property
    def _tokens(self) -> LLTokenizer:
        with self._building:
            return self._built

    @cached_property
    def _built(self) -> LLTokenizer:
        return new_tokens(self._vocabulary, self._eos_token_ids)

    def _settings(self) -> TrialSettings:
        return TrialSettings(
            self._tokenizer.backend.to_str(),
            self._vocab_size,
            self._eos_token_ids,
            self.seconds,
            self.crowded_seconds,
            GRAMMAR_BYTES,
        )

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self._tokenizer.backend, self._vocab_size, self._eos_token_ids)


# The line of llguidance's message that says what is wrong with an expression.
_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)


def _explained(error: str, params: StructuredOutputsParams) -> ParameterError:
    """Returns an error for one of llguidance about a grammar. It names the keyword at fault if there is one."""
    if params.kind == "json":
        assert params.json is not None
        if found := unenforced(error, read_schema(params.json, "json")):
            listed = ", ".join(first_named([keyword_at(*one) for one in found]))
            # What is too hard for llguidance cannot be ignored, as what it does not know can.
            way_out = "" if error.startswith(TOO_HARD) else f", or {params.way_out}"
            return ParameterError(
                f"json has {listed}, which cannot be enforced: leave it out{way_out}", "structured_outputs"
            )
    if params.kind == "regex" and (reason := _REGEX_ERROR.search(error)):  # the rest shows it within a grammar
        error = reason[1]
    return ParameterError(f"{params.kind} cannot be compiled: {one_line(error)}", "structured_outputs")


def _not_enforced(
    warnings: Sequence[str], schema: dict[str, Any], params: StructuredOutputsParams
) -> tuple[list[str], list[str]]:
    """Returns what is told of a schema that is not enforced in all, and the part of it that is not lenient.

    `warnings` are those of llguidance.
    """
    found = {text: unenforced(text, schema) for text in warnings}
    named = list(dict.fromkeys([*chain.from_iterable(found.values()), *forgotten(schema)]))
    # Which oneOf is inexact is not known, where there are several.
    unplaced = [text for text, places in found.items() if text.startswith("oneOf") or not places]
    refused = [text for text in unplaced if not params.is_lenient_at("#") and not found[text]]
    refused += [keyword_at(*one) for one in named if not params.is_lenient_at(one[1])]
    told = [f"{keyword_at(*one)} is not enforced" for one in named if one[0] != "oneOf"]
    return unplaced + first_named(told), refused
