"""`response_format`: OpenAI's way to ask for a form of the answer's text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import ConfigDict, Field

from jaxvllm.core.errors import ParameterError, UnsupportedParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.server.protocol.fields import Strict


class ResponseJsonSchema(Strict):
    """A schema with a name, which is for the caller's own use."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str
    description: str | None = None
    # The name of the attribute differs, because pydantic has a method of this name.
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")  # null: any JSON object
    strict: bool | None = None  # has no effect: the schema is enforced in any case


class ResponseFormat(Strict):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: ResponseJsonSchema | None = None  # only with this type
    # vLLM's description of free text in which tagged parts have a form: either the first two, or the third.
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """Returns the form, or None where any text will do. Raises ParameterError for one that is not complete."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutputsParams(json_object=True)
            case "json_schema":
                if self.json_schema is None:
                    raise ParameterError("response_format.json_schema is missing", "response_format.json_schema")
                schema = self.json_schema.json_schema
                asked: dict[str, Any] = {"json_object": True} if schema is None else {"json": schema}
            case "structural_tag":
                asked = {"structural_tag": self.model_dump(exclude_none=True)}
        try:
            return StructuredOutputsParams(**asked)
        except ParameterError as error:  # it is too large
            raise ParameterError(f"response_format: {error}", "response_format") from error


type Form = StructuredOutputsParams | dict[str, Any]


def one_form(**forms: Form | None) -> Form | None:
    """Returns the one form that the fields of a request ask for. Raises ParameterError when several fields ask for one.

    The error names the first of them, so the field that a client would rather leave out comes first.
    """
    given = {field: form for field, form in forms.items() if form is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise ParameterError(f"{first} and {second} ask for two forms of one answer: leave one of them out", first)
    return next(iter(given.values()), None)


@contextmanager
def form_given_as(field: str) -> Iterator[None]:
    """Makes errors about `structured_outputs` that are raised inside the block name the request's own `field`."""
    try:
        yield
    except (ParameterError, UnsupportedParameterError) as error:
        if error.param == "structured_outputs" != field:
            error.param = field
            error.args = (f"{field}: {error}",)
        raise
