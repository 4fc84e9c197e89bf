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
    is_harmony: bool = False  # an answer is several messages in channels; these marks begin reasoning and answer

    def opens(self, prompt: str, continued: str | None = None) -> bool:
        """Returns whether the text after `prompt` begins inside the reasoning.

        A template that ends with one of the marks decides it. Where the answer continues a message, the text of this
        message, `continued`, decides it.
        """
        if continued is not None:
            return continued.rfind(self.start) > continued.rfind(self.end)
        prompt = prompt.rstrip()
        return prompt.endswith(self.start) or (self.is_open and not prompt.endswith(self.end))


_THINK = ReasoningFormat("<think>", "</think>")
_OPEN_THINK = ReasoningFormat("<think>", "</think>", is_open=True)

# vLLM's names of its reasoning parsers.
FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek_r1": _OPEN_THINK,
        "deepseek_v3": _THINK,
        "ernie45": _OPEN_THINK,
        "glm45": _THINK,
        "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
        "kimi_k2": _THINK,
        "minimax_m2": _OPEN_THINK,
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
        "olmo3": _THINK,
        "openai_gptoss": ReasoningFormat(
            "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", is_harmony=True
        ),
        "qwen3": _THINK,
        "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", is_open=True),
        "step3": _OPEN_THINK,
    }
)
