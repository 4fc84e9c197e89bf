"""The bodies of `/tokenize` and `/detokenize`, compatible with vLLM's."""

from typing import Any

from jaxvllm.server.protocol.chat_completions import Tools
from jaxvllm.server.protocol.fields import Messages, Reply, Strict, TemplateVariables, Tokens, neutral


class TokenizeRequest(Strict):
    """A text or a conversation to tokenize. Exactly one of them must be given."""

    model: str | None = None  # None: the served model
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # None: true for a text, false for messages: the template writes them
    return_token_strs: bool | None = None

    # These fields are only for messages.
    add_generation_prompt: bool | None = None  # None: true unless the last message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None

    # A template is a program, and clients must not bring programs.
    chat_template: str | None = neutral()
    mm_processor_kwargs: dict[str, Any] | None = neutral({})


class TokenizeResponse(Reply):
    """The tokens, of which there may be more than the model takes."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # the tokens as the vocabulary spells them; null unless return_token_strs is true


class DetokenizeRequest(Strict):
    """Token ids to convert to text."""

    model: str | None = None  # None: the served model
    tokens: Tokens


class DetokenizeResponse(Reply):
    """The text, special tokens included."""

    prompt: str
