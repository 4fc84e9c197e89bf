"""`response_format`: OpenAI's way to ask for a form of the answer's text."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.server.protocol.fields import Strict


class ResponseFormatText(Strict):
    """Any text."""

    type: Literal["text"]


class ResponseFormatJsonObject(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class ResponseJsonSchema(Strict):
    """A schema with a name, which is for the caller's own use."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str
    description: str | None = None
    # The name of the attribute differs, because pydantic has a method of this name.
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")  # None: any JSON object
    strict: bool | None = None  # the schema is enforced in any case


class ResponseFormatJsonSchema(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: ResponseJsonSchema


class ResponseFormatStructuralTag(Strict):
    """Free text in which tagged parts have a form. vLLM's description of the tags is passed on as it is."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["structural_tag"]


type ResponseFormat = Annotated[
    ResponseFormatText | ResponseFormatJsonObject | ResponseFormatJsonSchema | ResponseFormatStructuralTag,
    Field(discriminator="type"),
]


def structured_outputs(format: Strict | None, field: str = "response_format") -> StructuredOutputsParams | None:
    """Returns the form that `format`, a `ResponseFormat` in the request's `field`, asks for; None where any will do."""
    try:
        match format:
            case ResponseFormatJsonObject():
                return StructuredOutputsParams(json_object=True)
            case ResponseFormatJsonSchema(json_schema=ResponseJsonSchema(json_schema=None)):
                return StructuredOutputsParams(json_object=True)
            case ResponseFormatJsonSchema(json_schema=ResponseJsonSchema(json_schema=schema)):
                return StructuredOutputsParams(json=schema)  # type: ignore[arg-type]  # it is stored as text
            case ResponseFormatStructuralTag():
                return StructuredOutputsParams(structural_tag=format.model_dump())  # type: ignore[arg-type]
    except ParameterError as error:
        raise ParameterError(f"{field}: {error}", field) from error
    return None


def one_form(
    **forms: StructuredOutputsParams | dict[str, Any] | None,
) -> StructuredOutputsParams | dict[str, Any] | None:
    """Returns the one form that the fields of a request ask for. Raises ParameterError when several fields ask for one.

    The error names the first of them, so the field that a client would rather leave out comes first.
    """
    given = {field: form for field, form in forms.items() if form is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise ParameterError(f"{first} and {second} ask for two forms of one answer: leave one of them out", first)
    return next(iter(given.values()), None)
