"""`Readers`: makes the reader of prompts for a model once, also where several engines have the model."""

from jaxvllm.text.prompts import PromptReader
from jaxvllm.text.tokenizer import Tokenizer
from jaxvllm.worker import wire


class Readers:
    """Readers of prompts, by what the engines tell of their model."""

    def __init__(self, chat_template: str | None = None):
        """Takes a chat template that replaces the model's."""
        self._chat_template = chat_template
        self._made: dict[tuple[str | None, int, int], PromptReader] = {}

    def reader(self, facts: wire.EngineFacts) -> PromptReader:
        """Returns the reader for this model. The first call reads the tokenizer: a second for a large one."""
        key = facts.tokenizer_directory, facts.vocab_size, facts.max_model_len
        if key not in self._made:
            directory = facts.tokenizer_directory
            tokenizer = None if directory is None else Tokenizer.from_directory(directory)
            if tokenizer is not None and self._chat_template is not None:
                tokenizer = tokenizer.with_chat_template(self._chat_template)
            self._made[key] = PromptReader(tokenizer, facts.vocab_size, facts.max_model_len)
        return self._made[key]
