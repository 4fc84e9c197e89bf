"""Checks chat messages in the form of OpenAI's API, and converts them to the form that chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxvllm.core.errors import ParameterError

# The common roles, "function", the older name of "tool", and "ipython", which is Llama 3.1's role for tool results.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

# The names of the variables that the engine itself gives to a chat template.
RESERVED_VARIABLES = ("self", "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message")

# How the types of parts begin that hold no text.
_MEDIA = ("image", "input_image", "input_audio", "audio", "video", "file", "input_file")

type Message = dict[str, Any]


def checked_messages(messages: Sequence[Mapping[str, Any]], keeps_parts: bool = False) -> list[Message]:
    """Returns copies of the messages in which content is text and the arguments of tool calls are objects.

    The parts of a multi-part content are joined by newlines, unless `keeps_parts`. Keys that only a template knows are
    kept. The older form of tool calls, a `function_call` and then a message of role "function", becomes the form that
    templates know.
    """
    if not isinstance(messages, list | tuple):
        raise ParameterError(f"messages must be a list of messages, not a {type(messages).__name__}", "messages")
    if not messages:
        raise ParameterError("messages is empty: give at least one", "messages")
    checked: list[Message] = []
    call_id = _call_id(0)  # of the function that was called last
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if isinstance(message, Mapping) and message.get("function_call") is not None:
            call_id = _call_id(i)
        checked.append(_checked(where, _with_tools(where, message, call_id), keeps_parts))
    return checked


def ends_with(message: Message, mark: str) -> Message:
    """Returns a copy of a checked message with `mark` after its content."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + mark}
    *first, last = content or [_part("")]
    return message | {"content": [*first, _part(last["text"] + mark)]}


def as_parts(message: Message) -> Message:
    """Returns a copy of a checked message whose content, if it is a text, is a list of one part, or of none."""
    content = message["content"]
    return message | {"content": [_part(content)] if content else []} if isinstance(content, str) else message


def text_of(message: Message) -> str:
    """Returns the content of a checked message as one text."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def with_one_system_message(messages: Sequence[Message], everywhere: bool = False) -> list[Message]:
    """Returns checked messages that begin with at most one message of the system.

    The system's messages at the beginning become one, and with `everywhere` the others join them.
    """
    start = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    rest = list(messages[start:])
    system = list(messages[:start])
    if everywhere:
        system += [message for message in rest if message["role"] == "system"]
        rest = [message for message in rest if message["role"] != "system"]
    if len(system) < 2:
        return [*system, *rest]
    texts = [text for message in system if (text := text_of(message))]
    return [system[0] | {"content": "\n\n".join(texts)}, *rest]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _call_id(index: int) -> str:
    """Returns the id of a call that came without one. Some templates want nine characters."""
    return f"call{index:05}"


def _with_tools(where: str, message: object, call_id: str) -> object:
    """Returns a message without the older form of tool calls. What `_checked` checks is not checked here."""
    if not isinstance(message, Mapping):
        return message
    changed = {name: value for name, value in message.items() if name != "function_call"}
    if (call := message.get("function_call")) is not None:
        if message.get("tool_calls"):
            raise ParameterError(
                f"{where} has tool_calls and a function_call: leave the second out", f"{where}.function_call"
            )
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise ParameterError(
                f"{where}.function_call must have a name and arguments, not {_shown(call)}", f"{where}.function_call"
            )
        function = _with_arguments(f"{where}.function_call", call)
        changed["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    if message.get("role") == "function":
        if not isinstance(message.get("name"), str):
            raise ParameterError(
                f"{where}.name must be the name of the function, not {_shown(message.get('name'))}", f"{where}.name"
            )
        content = message.get("content")
        changed |= {"role": "tool", "tool_call_id": call_id, "content": "" if content is None else content}
    return changed


def _checked(where: str, message: object, keeps_parts: bool) -> Message:
    if not isinstance(message, Mapping):
        raise ParameterError(f"{where} must be an object with role and content, not {_shown(message)}", where)
    role = message.get("role")
    if role not in ROLES:
        raise ParameterError(f"{where}.role must be one of {', '.join(ROLES)}, not {_shown(role)}", f"{where}.role")
    checked = dict(message)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ParameterError(f"{where}.tool_calls must be a list, not {_shown(calls)}", f"{where}.tool_calls")
        checked["tool_calls"] = [_checked_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    else:  # templates ask whether there is such a key
        checked.pop("tool_calls", None)
    # Both names are in use, by clients as well as by templates.
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        checked["reasoning_content"] = checked["reasoning"] = reasoning
    content = message.get("content")
    if content is None and not (role == "assistant" and (calls or reasoning)):
        raise ParameterError(
            f"{where} has no content: give {where}.content, which only an assistant message with tool_calls or "
            "reasoning may lack",
            f"{where}.content",
        )
    if content is None or isinstance(content, str):
        checked["content"] = content or ""  # templates would write null as "None"
    else:
        texts = _texts(f"{where}.content", content)
        checked["content"] = [_part(text) for text in texts] if keeps_parts and texts else "\n".join(texts)
    return checked


def _texts(where: str, content: object) -> list[str]:
    """Returns the texts of the parts of a message's content."""
    if not isinstance(content, Sequence):
        raise ParameterError(f"{where} must be a string or a list of text parts, not {_shown(content)}", where)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            if isinstance(kind, str) and kind.startswith(_MEDIA):
                raise ParameterError(
                    f"{where}[{i}] must be a text, not {_shown(kind)}: this model reads text only", f"{where}[{i}]"
                )
            raise ParameterError(
                f"{where}[{i}] must be a part of type 'text' with a text, not {_shown(kind)}", f"{where}[{i}]"
            )
        texts.append(part["text"])
    return texts


def _checked_call(where: str, call: object) -> dict[str, Any]:
    """Returns a copy of a tool call with an object as its arguments."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or "name" not in function:
        raise ParameterError(f"{where} must have a function with a name, not {_shown(call)}", where)
    return dict(call) | {"function": _with_arguments(f"{where}.function", function)}


def _with_arguments(where: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a call's function with an object as its arguments.

    Templates print the arguments as JSON themselves, so a string would be quoted twice.
    """
    arguments = function.get("arguments") or {}
    where = f"{where}.arguments"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ParameterError(f"{where} is not valid JSON: {error}", where) from error
    if not isinstance(arguments, Mapping):
        raise ParameterError(f"{where} must be a JSON object, not {_shown(arguments)}", where)
    return dict(function) | {"arguments": dict(arguments)}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
