"""`ReasoningFormat`: the marks between which a model writes its reasoning, before the answer that people asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks of one family of models. Each is usually one token of the vocabulary.

    With `is_open`, the text of an answer begins inside the reasoning: the template, or the habit of the model, leaves
    out the start mark.
    """

    start: str
    end: str
    is_open: bool = False


# vLLM's names of its reasoning parsers.
FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek_r1": ReasoningFormat("<think>", "</think>", is_open=True),
        "deepseek_v3": ReasoningFormat("<think>", "</think>"),
        "qwen3": ReasoningFormat("<think>", "</think>"),
        "glm45": ReasoningFormat("<think>", "</think>"),
        "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    }
)
