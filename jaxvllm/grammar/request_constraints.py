"""`RequestConstraints`: the constraint of every request that has one, from the sampling parameters of the request."""

from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.token_constraint import TokenConstraint
from jaxvllm.grammar.reasoning import ReasoningConstraint, ReasoningMarks
from jaxvllm.text.reasoning import ReasoningFormat
from jaxvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxvllm.grammar.compiler import GrammarCompiler
    from jaxvllm.grammar.constraint import CompiledGrammar


class RequestConstraints:
    """Makes the constraints of requests to one engine. Grammars compile in threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        reasoning: ReasoningFormat | None,
        lenient: bool,
    ):
        """Takes what all requests share.

        With `lenient`, what cannot be enforced of schemas is ignored, with a warning.
        """
        self._of_model = tokenizer, vocab_size, eos_token_ids
        self._lock = Lock()  # several threads prepare grammars
        self._compiler: GrammarCompiler | None = None
        self._is_closed = False
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._lenient = lenient

    def prepare(self, params: SamplingParams) -> "Future[CompiledGrammar] | None":
        """Returns the grammar of `params`, or the error in it, as soon as it is compiled. None if they have none."""
        asked = params.structured_outputs
        if asked is None:
            return None
        return self._of_all().compile(replace(asked, lenient=True, strict_parts=()) if self._lenient else asked)

    def check(self, params: SamplingParams, grammar: "CompiledGrammar") -> None:
        """Raises ParameterError where `params` allow no token with which a text of `grammar` may begin."""
        allowed = params.allowed_token_ids
        if allowed is not None and self._marks is None and not grammar.begins_with_any(allowed):
            raise ParameterError(
                f"allowed_token_ids must have a token with which a text of the form of the answer may begin, and none "
                f"of the {len(allowed)} is one: allow others, or change the form",
                "allowed_token_ids",
            )

    def constraint(self, request: GenerationRequest, grammar: "CompiledGrammar | None") -> TokenConstraint | None:
        """Returns the constraint of one sequence, or None if it has none. `grammar` is what `prepare` made."""
        budget = request.params.thinking_token_budget
        answer = None if grammar is None else grammar.constraint()
        if self._marks is None or (answer is None and budget is None):
            return answer
        return ReasoningConstraint(self._marks, request.prompt.token_list, answer, budget)

    def warm_up(self) -> None:
        """Builds in the background what takes long to build. No step is planned meanwhile."""
        self._of_all().warm_up()

    def close(self) -> None:
        """Ends the threads. What is prepared afterwards has an OverloadedError."""
        with self._lock:
            self._is_closed = True
            if self._compiler is not None:
                self._compiler.close()

    def _of_all(self) -> "GrammarCompiler":
        """Returns the one compiler. It is imported when it is first needed, because that takes 12 ms of a start."""
        from jaxvllm.grammar.compiler import GrammarCompiler

        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(*self._of_model)
                if self._is_closed:
                    self._compiler.close()
            return self._compiler

    @cached_property
    def _marks(self) -> ReasoningMarks | None:
        return None if self._reasoning is None else ReasoningMarks(self._reasoning, self._tokenizer)


def without_tokenizer() -> ParameterError:
    """Returns the error for a request that needs text where the engine has only token ids."""
    return ParameterError(
        "structured_outputs and thinking_token_budget need a tokenizer, and the model's directory has none: set "
        "tokenizer",
        "structured_outputs",
    )
