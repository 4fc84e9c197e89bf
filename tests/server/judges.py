"""The types of OpenAI's and Anthropic's clients, which judge what servers answer.

They are imported when the first of them is asked for. All processes of a run collect the tests of servers, and one of
them runs these: the others would spend three seconds on clients that they do not need.
"""

from functools import cache
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter


@cache
def judge(name: str) -> TypeAdapter[Any]:
    """Returns what validates data as a type by its full name, such as `openai.types.Completion`."""
    module, _, of_module = name.rpartition(".")
    return TypeAdapter(getattr(import_module(module), of_module))
