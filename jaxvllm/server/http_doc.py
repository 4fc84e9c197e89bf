"""Makes the reference of all endpoints from the application itself, as Markdown and as an HTML page."""

import html
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter

from jaxvllm.core import explanation
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.server.exchange import EVENT_STREAM
from jaxvllm.server.protocol.chat_completions import ChatChunk
from jaxvllm.server.protocol.completions import CompletionResponse
from jaxvllm.server.protocol.fields import NOT_SUPPORTED, SamplingFields
from jaxvllm.server.protocol.generate import GenerateResponse
from jaxvllm.server.protocol.message_events import MessagesEvent
from jaxvllm.server.protocol.response_events import ResponsesEvent

REFERENCE = "#/components/schemas/"
# The type of the data of a stream's events, which an OpenAPI document cannot express.
STREAMS: dict[str, Any] = {
    "/v1/completions": CompletionResponse,
    "/v1/chat/completions": ChatChunk,
    "/v1/responses": ResponsesEvent,
    "/v1/messages": MessagesEvent,
    "/inference/v1/generate": GenerateResponse,
    "/invocations": CompletionResponse | ChatChunk | ResponsesEvent,
}
_USER = {"role": "user", "content": "Which day comes after Friday?"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0},
    "/v1/embeddings": {"input": ["Once upon a time", "Long ago"], "encoding_format": "base64"},
    "/v1/chat/completions": {"messages": [_USER], "stream": True, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": _USER["content"], "instructions": "Be brief.", "max_output_tokens": 20},
    "/v1/responses/input_tokens": {"input": _USER["content"]},
    "/v1/messages": {"messages": [_USER], "system": "Be brief.", "max_tokens": 20},
    "/v1/messages/count_tokens": {"messages": [_USER]},
    "/inference/v1/generate": {"token_ids": [0, 4, 1581], "sampling_params": {"max_tokens": 20, "temperature": 0}},
    "/invocations": {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0},
    "/tokenize": {"messages": [_USER]},
    "/detokenize": {"tokens": [0, 4, 1581]},
}
INTRODUCTION = """\
# The HTTP API

`python -m tools.http_doc` makes this page from the application. A running server shows it at `/docs`, and an OpenAPI
document at `/openapi.json`.

A field that is not listed is an error, and so is one that is listed as not supported, unless its value changes nothing.
Values are never converted: `"1"` is no number. A sampling parameter that a request leaves out has the value that the
checkpoint recommends, or else the default of `SamplingParams`.
"""

type Schema = Mapping[str, Any]


def markdown(app: FastAPI) -> str:
    """Returns the whole reference as Markdown."""
    document = app.openapi()
    objects: dict[str, Schema] = dict(document["components"]["schemas"])
    sections: list[str] = []
    for path, methods in document["paths"].items():
        for method, endpoint in methods.items():
            sections += _endpoint(path, method, endpoint, objects)
    shown = {name: schema for name, schema in objects.items() if not name.endswith("Request")}
    tables = (
        f"### {name}\n\n{schema.get('description', '')}\n\n{_fields(name, schema, objects)}\n"
        for name, schema in shown.items()
        if "properties" in schema
    )
    return "\n".join([INTRODUCTION, *sections, "## Objects\n", *tables])


def _endpoint(path: str, method: str, endpoint: Schema, objects: dict[str, Schema]) -> Iterator[str]:
    yield f"## {method.upper()} {path}\n\n{endpoint['description']}\n"
    asked = endpoint.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "$ref" in asked:
        name = _name(asked)
        yield _fields(name, objects[name], objects) + "\n"
        if refused := list(_refused(objects[name])):
            yield f"Fields that are not supported, and refused unless they have these values: {', '.join(refused)}.\n"
    if path in EXAMPLES:
        body = json.dumps(EXAMPLES[path])
        yield f"```sh\ncurl localhost:8000{path} -H 'Content-Type: application/json' -d '{body}'\n```\n"
    answers = endpoint["responses"]
    kinds = answers["200"].get("content", {})
    if "application/json" in kinds and kinds["application/json"].get("schema"):
        yield f"Answers with {_type(kinds['application/json']['schema'], objects)}.\n"
    if EVENT_STREAM in kinds:
        schema = TypeAdapter(STREAMS[path]).json_schema(ref_template=REFERENCE + "{model}")
        for name, own in schema.pop("$defs", {}).items():
            objects.setdefault(name, own)
        if "title" in schema:
            objects.setdefault(schema["title"], schema)
        told = _type({"$ref": REFERENCE + schema["title"]} if "title" in schema else schema, objects)
        yield f"{answers['200']['description']}. The data of an event is {told}.\n"
    rows = (f"| {status} | {answer['description']} |" for status, answer in sorted(answers.items()) if status != "200")
    if table := "\n".join(rows):
        yield f"| status | when |\n|---|---|\n{table}\n"


def _fields(name: str, schema: Schema, objects: Mapping[str, Schema]) -> str:
    """Returns a table of an object's fields, without those that are not supported."""
    notes = _notes(name)
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    required = schema.get("required", ())
    for field, own in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        if own.get("description", "").startswith(NOT_SUPPORTED):
            continue
        default = "required" if field in required else _shown(own.get("default"))
        rows.append(f"| `{field}` | {_type(own, objects)} | {default} | {notes.get(field, '')} |")
    return "\n".join(rows)


def _refused(schema: Schema) -> Iterator[str]:
    for field, own in schema["properties"].items():
        told = own.get("description", "")
        if told.startswith(NOT_SUPPORTED):
            yield f"`{field}` ({told.removeprefix(NOT_SUPPORTED + ': ')})"


def _type(schema: Schema, objects: Mapping[str, Schema]) -> str:
    """Describes the type of a value in words."""
    if "$ref" in schema:
        name = _name(schema)
        is_object = "properties" in objects.get(name, {})
        return f"[{name}](#{name.lower()})" if is_object else _type(objects[name], objects)
    if forms := schema.get("anyOf") or schema.get("oneOf"):
        return _or(_type(form, objects) for form in forms if form.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return _or(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema.get('items', {}), objects)}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"object of {_type(inner, objects)}" if isinstance(inner, dict) else "object"
        case str(kind):
            return kind + _bounds(schema)
    return "anything"


def _bounds(schema: Schema) -> str:
    told = {"minimum": "from", "maximum": "to", "minLength": "from", "maxLength": "to"}
    parts = [f"{word} {int(schema[key])}" for key, word in told.items() if key in schema]
    unit = " characters" if "minLength" in schema or "maxLength" in schema else ""
    return f" {' '.join(parts)}{unit}" if parts else ""


def _or(forms: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(forms))


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).removeprefix(REFERENCE)


def _shown(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _notes(name: str) -> dict[str, str]:
    """Returns the comments beside a model's fields by field, so that the reference need not repeat them."""
    notes: dict[str, str] = {}
    for model in (*_models(BaseModel), *vars(explanation).values()):
        if isinstance(model, type) and model.__name__ == name and model.__module__.startswith("jaxvllm."):
            owners = [owner for owner in reversed(model.__mro__) if owner.__module__.startswith("jaxvllm.")]
            for owner in (SamplingParams, *owners) if issubclass(model, SamplingFields) else owners:
                notes |= dict(re.findall(r"^    (\w+): [^#\n]*  # (?!type: )(.+)$", inspect.getsource(owner), re.M))
    return {field: re.sub(r"\bNone\b", "null", note) for field, note in notes.items()}


def _models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


# ---- the page ----

STYLE = """\
:root { color-scheme: light dark }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8884 }
pre { padding: .8rem; overflow-x: auto; background: #8882 }
"""


def page(app: FastAPI) -> str:
    """Returns the reference as one HTML page without scripts. The page loads no other file."""
    body = "\n".join(_block(block) for block in re.split(r"\n{2,}", markdown(app)) if block.strip())
    head = f'<meta charset="utf-8"><title>jaxvllm: HTTP API</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _block(text: str) -> str:
    """Converts a block of the Markdown that `markdown` writes to HTML."""
    text = text.strip("\n")
    if text.startswith("#"):
        marks, title = text.split(" ", 1)
        level, anchor = len(marks), title.lower().replace(" ", "-").replace("/", "")
        return f'<h{level} id="{html.escape(anchor)}">{_inline(title)}</h{level}>'
    if text.startswith("```"):
        return f"<pre>{html.escape(text.removeprefix('```sh').removesuffix('```').strip())}</pre>"
    if text.startswith("|"):
        head, _, *rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in text.split("\n")]
        cells = ["".join(f"<th>{_inline(cell)}</th>" for cell in head)]
        cells += ["".join(f"<td>{_inline(cell)}</td>" for cell in row) for row in rows]
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"
    return f"<p>{_inline(text)}</p>"


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text.strip(), quote=False))
    return re.sub(r"\[(\w+)\]\((#\w+)\)", r'<a href="\2">\1</a>', text)
