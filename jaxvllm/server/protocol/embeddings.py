"""The bodies of `/v1/embeddings`, compatible with OpenAI's and vLLM's clients."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import FailFast, Field

from jaxvllm.core.pooling_params import PoolingParams
from jaxvllm.core.value_checks import MAX_INT32
from jaxvllm.server.protocol.fields import (
    Messages,
    Priority,
    Reply,
    Strict,
    Strings,
    TemplateVariables,
    Tokens,
    as_prompts,
    neutral,
)

# In one request, as in OpenAI's API.
MAX_INPUTS = 2048
type Inputs = Annotated[list[Tokens], FailFast()]


class EmbeddingRequest(Strict):
    """Texts to make vectors of, each as text or as token ids, or one conversation."""

    model: str | None = None  # None: the served model
    input: str | Strings | Tokens | Inputs | None = None
    messages: Messages | None = None  # a conversation in place of input
    encoding_format: Literal["float", "base64"] = "float"  # base64: little-endian float32 numbers
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None  # None: all that the model has
    use_activation: bool | None = None  # whether vectors get length 1; None: as the checkpoint says, or true
    truncate_prompt_tokens: int | None = None  # keep so many of the last tokens; -1: as many as the model takes
    truncation_side: str | None = neutral("left")  # the last tokens are kept
    add_special_tokens: bool | None = None  # None: true for a text, false for messages: the template writes them
    priority: Priority = 0  # lower values run first, if the engine has scheduling_policy="priority"
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # equal salts share cached prefixes
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")] | None = None
    user: Any = None  # for the client's own use

    # These fields are only for messages.
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables | None = None

    # A template is a program, and clients must not bring programs.
    chat_template: str | None = neutral()
    mm_processor_kwargs: dict[str, Any] | None = neutral({})
    embed_dtype: str | None = neutral("float32")
    endianness: str | None = neutral("little", "native")
    padding: bool | None = neutral(False)
    normalize: bool | None = neutral()  # vLLM's older name of use_activation

    def inputs(self) -> list[str | list[int]]:
        """Returns the inputs as a list, even if there is only one. Raises ParameterError for none, or too many."""
        return as_prompts(self.input, "input", MAX_INPUTS)

    def pooling_params(self) -> PoolingParams:
        """Returns what the client wants of the vectors."""
        return PoolingParams(self.dimensions, self.use_activation, self.truncate_prompt_tokens)

    def encoded(self, vector: NDArray[np.float32]) -> str | list[float]:
        """Returns a vector in the format that the client wants."""
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers


class Embedding(Reply):
    """One vector."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingUsage(Reply):
    """The number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(Reply):
    """The vectors, in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
