"""`/tokenize` and `/detokenize`, as vLLM's."""

from typing import Any

from jaxvllm.server.protocol.fields import Messages, Reply, Strict, TemplateVariables, Tokens, neutral


class TokenizeRequest(Strict):
    """A text, or a conversation: one of both."""

    model: str | None = None  # None: the one that is served
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # None: to a text yes; to messages no, as the template writes them
    return_token_strs: bool | None = None

    # Of messages.
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    tools: list[Any] | None = neutral([])
    # From strangers: a template is a program.
    chat_template: str | None = neutral()
    mm_processor_kwargs: dict[str, Any] | None = neutral({})


class TokenizeResponse(Reply):
    """The tokens; there may be more than the model takes."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # as the vocabulary spells them; null unless return_token_strs asks for them


class DetokenizeRequest(Strict):
    """Token ids whose text is wanted."""

    model: str | None = None  # None: the one that is served
    tokens: Tokens


class DetokenizeResponse(Reply):
    """The text, special tokens included."""

    prompt: str
