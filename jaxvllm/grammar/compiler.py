"""`GrammarCompiler`: turns what requests ask for into grammars, in threads of its own, each at most once."""

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from queue import SimpleQueue

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar.constraint import CompiledGrammar, fill_mask, one_line
from jaxvllm.grammar.json_schema import forgotten, read_schema, unenforced
from jaxvllm.grammar.source import grammar_source
from jaxvllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_THREADS = 2
# Compiling recurses as deeply as rules refer to each other: a chain of 3000 definitions ended the process at the usual
# 8 MiB. This is address space, of which a thread takes what it uses.
STACK_BYTES = 2**29
# From this many tokens on a tokenizer is built before the first request asks: llguidance holds the GIL all the while,
# 0.9 s for 128k tokens, in which no step would be planned.
LARGE_VOCABULARY = 2**15
# A request may wait this long for its grammar, from when its turn to be compiled came.
COMPILE_SECONDS = 10.0
# Grammars that are kept: so many, and together with texts of so many bytes.
MAX_CACHED = 256
MAX_CACHED_BYTES = 2**24

_LIMITS = LLParserLimits(
    max_lexer_states=100_000,  # of 1 to 2 kB
    verbose_errors=False,  # which hold parts of the text
)

type _Key = StructuredOutputsParams


class GrammarCompiler:
    """Compiles `StructuredOutputsParams` for one tokenizer. Threads may share it.

    Equal parameters are compiled once, as long as the result is in the cache, which drops what was used longest ago.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...], seconds: float = COMPILE_SECONDS
    ):
        """`vocab_size` is that of the model. Nothing is built before `warm_up` or the first request."""
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = eos_token_ids
        self.seconds = seconds
        self._lock = threading.Lock()  # of the cache and the threads
        self._cache: OrderedDict[_Key, Future[CompiledGrammar]] = OrderedDict()
        self._num_bytes = 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None ends a thread
        self._num_threads = 0
        self._building = threading.Lock()

    def warm_up(self) -> None:
        """Builds the tokenizer in the background if its vocabulary is large."""
        if self._vocab_size >= LARGE_VOCABULARY:
            self._submit(lambda: None if self._vocabulary else None)

    def compile(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """Returns the grammar of `params`, or a ParameterError, as soon as it is compiled. Takes no time itself."""
        with self._lock:
            if (known := self._cache.get(params)) is not None:
                self._cache.move_to_end(params)
                return known
            future: Future[CompiledGrammar] = Future()
            self._cache[params] = future
            self._num_bytes += _size(params)
            while len(self._cache) > 1 and (len(self._cache) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES):
                oldest, _ = self._cache.popitem(last=False)
                self._num_bytes -= _size(oldest)
        self._submit(lambda: self._run(params, future))
        return future

    def close(self) -> None:
        """Ends the threads after what they compile. Nothing may be compiled afterwards."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._num_threads < NUM_THREADS:
                self._num_threads += 1
                before = threading.stack_size(STACK_BYTES)
                try:
                    threading.Thread(target=self._work, name="jaxvllm-grammar", daemon=True).start()
                finally:
                    threading.stack_size(before)
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _run(self, params: StructuredOutputsParams, future: Future[CompiledGrammar]) -> None:
        late = ParameterError(
            f"structured_outputs: it took longer than {self.seconds:g} s to compile: make the grammar smaller",
            "structured_outputs",
        )
        timer = threading.Timer(self.seconds, lambda: _settle(future, late))
        timer.daemon = True
        timer.start()
        try:
            grammar = self._compile(params)
        except ParameterError as error:
            _settle(future, ParameterError(f"structured_outputs: {error}", "structured_outputs"))
        except BaseException as error:  # a panic of llguidance is a BaseException
            logger.exception("a grammar could not be compiled")
            reason = one_line(str(error)) or type(error).__name__
            _settle(
                future, ParameterError(f"structured_outputs: it cannot be compiled: {reason}", "structured_outputs")
            )
        else:
            _settle(future, grammar)
        finally:
            timer.cancel()

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        name = params.kind
        source = grammar_source(params, self._special_tokens)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=_LIMITS)
        if error := matcher.get_error():
            raise _explained(error, params)
        warnings = [one_line(warning) for warning in matcher.get_grammar_warnings()]
        if name == "json":
            assert params.json is not None
            schema = read_schema(params.json, name)
            found = [(keyword, place) for text in warnings for keyword, place in unenforced(text, schema)]
            left = [text for text in warnings if not unenforced(text, schema)]
            warnings = [*left, *(f"{_at(*one)} is not enforced" for one in [*found, *forgotten(schema)])]
        if warnings and not params.lenient:
            raise ParameterError(
                f"{name} has what cannot be enforced ({'; '.join(warnings)}): leave it out, "
                "or set lenient to ignore it",
                "structured_outputs",
            )
        mask = np.zeros(-(-self._vocabulary.vocab_size // 32), np.int32)
        fill_mask(matcher, mask, len(mask))
        forced = tuple(matcher.compute_ff_tokens())
        if (error := matcher.get_error()) or not mask.any() or (matcher.is_stopped() and not matcher.is_accepting()):
            reason = f" ({one_line(error)})" if error else ""
            raise ParameterError(f"no text satisfies {name}{reason}: correct it", "structured_outputs")
        return CompiledGrammar(matcher, mask, forced, tuple(warnings))

    @property
    def _vocabulary(self) -> LLTokenizer:
        with self._building:
            return self._built

    @cached_property
    def _built(self) -> LLTokenizer:
        text = self._tokenizer.backend.to_str()
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids) or None)

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special and token.content}


# The line of llguidance's message that says what is wrong with an expression.
_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)


def _explained(error: str, params: StructuredOutputsParams) -> ParameterError:
    """An error of llguidance about a grammar, as one that names the keyword at fault where there is one."""
    if params.kind == "json":
        assert params.json is not None
        if found := unenforced(error, read_schema(params.json, "json")):
            listed = ", ".join(_at(*one) for one in found)
            return ParameterError(
                f"json has {listed}, which cannot be enforced: leave it out, or set lenient to ignore it",
                "structured_outputs",
            )
    if params.kind == "regex" and (reason := _REGEX_ERROR.search(error)):  # the rest shows it within a grammar
        error = reason[1]
    return ParameterError(f"{params.kind} cannot be compiled: {one_line(error)}", "structured_outputs")


def _at(keyword: str, place: str) -> str:
    return f"the keyword {json.dumps(keyword)} at {place}"


def _size(params: StructuredOutputsParams) -> int:
    texts = (params.json, params.regex, params.grammar, params.structural_tag, *(params.choice or ()))
    return sum(len(text) for text in texts if text is not None)


def _settle(future: Future[CompiledGrammar], result: CompiledGrammar | ParameterError) -> None:
    """Sets the result of `future`, unless it has one: compiling and its time limit race."""
    try:
        if isinstance(result, ParameterError):
            future.set_exception(result)
        else:
            future.set_result(result)
    except Exception as error:
        logger.debug("a grammar is late: %s", error)
