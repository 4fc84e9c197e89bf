"""Errors about a request. Each names the parameter at fault, because servers pass the name on to clients.

ValueError
  ParameterError               the caller gave a wrong value
    ContextLengthError         the prompt is too long for the model
NotImplementedError
  UnsupportedParameterError    the value is fine elsewhere, but not supported here
RuntimeError
  OverloadedError              there is no room for the request now, and may be later
"""


def belongs_to_work(error: BaseException) -> bool:
    """Returns whether an error is the fault of the work that raised it. An interrupt means the whole process.

    A panic of a library in Rust is no `Exception`, and belongs to the work.
    """
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


class ParameterError(ValueError):
    """A value that the caller gave is wrong. The message states the rule, the value and the way out."""

    def __init__(self, message: str, param: str | None = None):
        """Takes the parameter as the caller wrote it, such as `stop` or `messages[0].content`, or None."""
        super().__init__(message)
        self.param = param


class UnsupportedParameterError(NotImplementedError):
    """A value that this engine does not support, although other engines do. `param` is as in `ParameterError`."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class OverloadedError(RuntimeError):
    """Raised when there is no room for a request, because of others. The caller may try again later."""


class ContextLengthError(ParameterError):
    """A prompt that leaves too little room, or none, in the model's context."""

    def __init__(
        self,
        message: str,
        *,
        num_tokens: int = 0,
        max_prompt_tokens: int = 0,
        max_model_len: int = 0,
        num_chars: int = 0,
    ):
        """Takes the counts. `num_chars` is above 0 for a text that is refused before it is tokenized.

        Such a text has at least `num_tokens`.

        The numbers have defaults because `pickle` calls this with the message alone and restores them afterwards.
        """
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_prompt_tokens = max_prompt_tokens  # below `max_model_len` when an answer must fit too
        self.max_model_len = max_model_len
        self.num_chars = num_chars
