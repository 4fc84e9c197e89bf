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
    label: str = ""  # what may follow the start mark and is no part of the reasoning
    frame: tuple[str, ...] = ()  # the marks around the answer, which are no part of it
    is_content: bool = False  # the reasoning stays in the content, with both of its marks
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
_COHERE = ReasoningFormat(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)

# vLLM's names of its reasoning parsers.
FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "cohere_command3": _COHERE,
        "cohere_command4": _COHERE,
        "deepseek_r1": _OPEN_THINK,
        "deepseek_v3": _THINK,
        "deepseek_v4": _THINK,
        "ernie45": ReasoningFormat("<think>", "</think>", is_open=True, frame=("<response>\n", "\n</response>")),
        "gemma4": ReasoningFormat("<|channel>", "<channel|>", label="thought\n"),
        "glm45": _THINK,
        "glm47": _THINK,
        "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
        "holo2": _OPEN_THINK,
        "hunyuan_a13b": ReasoningFormat("<think>", "</think>", frame=("<answer>\n", "\n</answer>")),
        "hy_v3": _THINK,
        "kimi_k2": _THINK,
        "ling3": _THINK,
        "mimo": _THINK,
        "minimax_m2": _OPEN_THINK,
        "minimax_m2_append_think": ReasoningFormat("<think>", "</think>", is_open=True, is_content=True),
        "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
        "nemotron_v3": _OPEN_THINK,
        "olmo3": _THINK,
        "openai_gptoss": ReasoningFormat(
            "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", is_harmony=True
        ),
        "poolside_v1": _THINK,
        "qwen3": _THINK,
        "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", is_open=True),
        "solar_open2": ReasoningFormat("<|think:start|>", "<|think:end|>"),
        "step3": _OPEN_THINK,
        "step3p5": _OPEN_THINK,
    }
)
