"""The items of `/v1/responses`: what a conversation is made of, and what an answer consists of."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, Tag

from jaxvllm.server.protocol.fields import FunctionName, Reply, Strict, by_type, neutral, new_id
from jaxvllm.server.protocol.logprobs import TokenLogprob
from jaxvllm.server.protocol.response_tools import as_arguments, model_name

type Role = Literal["user", "assistant", "system", "developer"]
type ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputPart(Strict):
    """A text in a message. Clients may send the text of an earlier response back unchanged."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = neutral([])
    logprobs: list[Any] | None = None  # part of an earlier response; has no effect here


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


type InputParts = Annotated[
    list[InputPart], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart])
]  # a text, or several parts, which are joined by newlines


class MessageItem(Strict):
    """A message. The answer continues the last one if it is the assistant's and its status is not `completed`."""

    type: Literal["message"] = "message"
    role: Role
    content: InputParts
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # set by reasoning models


class InputCall(Strict):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str  # JSON of an object
    id: str | None = None
    status: ItemStatus | None = None
    namespace: FunctionName | None = None  # that the function was declared in
    caller: dict[str, Any] | None = neutral({"type": "direct"})


class InputCustomCall(Strict):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: FunctionName
    input: str
    id: str | None = None
    status: ItemStatus | None = None
    namespace: FunctionName | None = None
    caller: dict[str, Any] | None = neutral({"type": "direct"})


class InputCallOutput(Strict):
    """The result of a called function or custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    name: str | None = None  # the call has it too
    output: InputParts
    id: str | None = None
    status: ItemStatus | None = None
    caller: dict[str, Any] | None = neutral({"type": "direct"})


class SummaryPart(Strict):
    """A summary of a reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningPart(Strict):
    """A text of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


type SummaryParts = Annotated[list[SummaryPart], FailFast()]
type ReasoningParts = Annotated[list[ReasoningPart], FailFast()]


class InputReasoning(Strict):
    """The reasoning of an earlier answer. Only its content counts."""

    type: Literal["reasoning"]
    summary: SummaryParts = Field(default_factory=list)
    content: ReasoningParts | None = None
    encrypted_content: str | None = neutral("")
    id: str | None = None
    status: ItemStatus | None = None


class ItemReference(Strict):
    """An item of a stored response, or of its input, in whose place only its id is sent."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1, max_length=256)]


type InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCustomCall, Tag("<custom_tool_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    by_type(
        *("message", "function_call", "custom_tool_call", "function_call_output", "reasoning", "item_reference"),
        default="message",
        others={"custom_tool_call_output": "function_call_output"},
    ),
]


def messages_of(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Returns the items in the form for chat templates.

    Reasoning, text and calls that follow each other are one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the called functions, because some templates want them with the results

    def assistant(*taken: str) -> dict[str, Any]:
        """Returns the message of the assistant that the item belongs to: the last, unless it has more than `taken`."""
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in taken):
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for item in items:
        match item:
            case InputReasoning(content=content):
                if text := "\n".join(part.text for part in content or ()):
                    assistant("reasoning", "content", "tool_calls")["reasoning"] = text
            case InputCall() | InputCustomCall():
                name = model_name(item.namespace, item.name)
                arguments = item.arguments if isinstance(item, InputCall) else as_arguments(item.input)
                calls = assistant().setdefault("tool_calls", [])
                function = {"name": name, "arguments": arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
                names[item.call_id] = name
            case InputCallOutput(call_id=call_id, output=output):
                named = {"name": names[call_id]} if call_id in names else {}
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _texts(output)} | named)
            case MessageItem(role="assistant", content=content):
                assistant("content", "tool_calls")["content"] = _texts(content)
            case MessageItem(role=role, content=content):
                messages.append({"role": role, "content": _texts(content)})
    return messages


def listed(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Returns the items as `/v1/responses/{id}/input_items` shows them: each has an id, and says all that counts."""
    shown = []
    for item in items:
        told = item.model_dump(mode="json", exclude_none=True)
        if isinstance(item, MessageItem) and item.role == "assistant":
            for part in told["content"]:
                part |= {"type": "output_text", "annotations": []}
        prefix = _PREFIXES.get(item.type, "item_")
        shown.append({"id": new_id(prefix), "status": "completed"} | told)
    return shown


_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}


def _texts(parts: list[InputPart]) -> list[dict[str, str]]:
    return [{"type": "text", "text": part.text} for part in parts]


class OutputText(Reply):
    """The answer's text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]  # always empty
    logprobs: list[TokenLogprob]  # of the tokens since the last text, up to the end of this one


class OutputMessage(Reply):
    """The message that is the answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(Reply):
    """The reasoning that the model wrote for itself."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Reply):
    """The reasoning that the model wrote before its answer; only with --reasoning-parser."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]  # always empty, because nobody summarizes
    content: list[ReasoningText]
    encrypted_content: None = None


class OutputCall(Reply):
    """A call of a function, which the client is to make."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus  # incomplete: the answer ended within the call
    call_id: str
    name: str
    namespace: str | None = None  # only of a function that was declared in one
    arguments: str  # JSON; where it breaks rules of the function's schema, the model broke them


class OutputCustomCall(Reply):
    """A call of a custom tool, which the client is to make."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus  # incomplete: the answer ended within the call
    call_id: str
    name: str
    namespace: str | None = None  # only of a tool that was declared in one
    input: str


type OutputItem = Annotated[
    OutputMessage | OutputReasoning | OutputCall | OutputCustomCall, Field(discriminator="type")
]
