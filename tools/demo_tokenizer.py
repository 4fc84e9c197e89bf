"""The demo model's tokenizer: byte-level BPE over the generated corpus, and its chat template."""

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, END, PAD, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
# These are part of the text and not special, so decoding with skip_special_tokens keeps them for a tool-call parser.
TOOL_MARKS = ("<tool_call>", "</tool_call>")
# The input has Hugging Face's message format. The output is a token for the role, the text, and an end token.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
{{- '<|system|>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- 'Tools:' }}
{%- for tool in tools %}
{%- set function = tool.function if tool.function is defined else tool %}
{%- set parameters = function.parameters | default({}, true) %}
{{- '\\n' + function.name + '(' + (parameters.properties | default({}, true) | join(', ')) + '): ' \
+ (function.description | default('', true)) }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not (tools and loop.first) %}{{- '<|system|>' + message.content + '<|end|>' }}{%- endif %}
{%- elif message.role in ('user', 'tool', 'assistant') %}
{{- '<|' + message.role + '|>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
{{- (function.arguments if function.arguments is string else function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- else %}
{{- raise_exception('role ' + message.role + ' is unknown: use system, user, assistant or tool') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


class ChatTemplate:
    """The chat template, compiled once in Jinja's sandbox."""

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = self._refuse
        # Jinja's own filter escapes for HTML. Users will render with Hugging Face's filter, which writes plain JSON.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._template = environment.from_string(CHAT_TEMPLATE)

    @staticmethod
    def _refuse(message: str) -> None:
        raise ValueError(message)

    def render(
        self,
        messages: Iterable[dict[str, Any]],
        tools: Iterable[dict[str, Any]] = (),
        *,
        prompt: bool = False,
    ) -> str:
        """Renders the conversation as text. With `prompt` it is open for the assistant's turn."""
        return self._template.render(
            messages=list(messages),
            tools=list(tools),
            bos_token=BOS,
            eos_token=END,
            add_generation_prompt=prompt,
        )


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token in the vocabulary."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}: train it again")
    return found


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of `VOCAB_SIZE` tokens with all 256 bytes, so that any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Each digit is a token, so that sums are learnt digit by digit.
            pre_tokenizers.Split(Regex(r"[0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TOOL_MARKS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in TOOL_MARKS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, token_id(tokenizer, BOS))]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: use a larger sample")
    return tokenizer
