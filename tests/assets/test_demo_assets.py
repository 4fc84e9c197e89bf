"""The embedded checkpoints are small, whole and consistent: any Hugging Face reader can use them."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

ASSETS = Path(__file__).resolve().parents[2] / "jaxvllm" / "assets"
LIMITS = {"demo": 8_000_000, "demo-draft": 1_000_000}
folders = pytest.mark.parametrize("name", sorted(LIMITS))


def read(name: str, file: str) -> dict[str, Any]:
    return json.loads((ASSETS / name / file).read_text())


def tokenizer(name: str = "demo") -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / name / "tokenizer.json"))


@folders
def test_size_is_under_the_limit(name: str) -> None:
    assert sum(path.stat().st_size for path in (ASSETS / name).iterdir()) <= LIMITS[name]


def test_draft_has_the_tokenizer_of_the_model() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (ASSETS / "demo" / file).read_bytes() == (ASSETS / "demo-draft" / file).read_bytes()


@folders
def test_config_agrees_with_tokenizer(name: str) -> None:
    config, words, tokens = read(name, "config.json"), read(name, "tokenizer_config.json"), tokenizer(name)
    assert config["vocab_size"] == tokens.get_vocab_size()
    for kind in ("bos", "eos", "pad"):
        assert config[f"{kind}_token_id"] == tokens.token_to_id(words[f"{kind}_token"])
        assert read(name, "generation_config.json")[f"{kind}_token_id"] == config[f"{kind}_token_id"]
    assert words["model_max_length"] == config["max_position_embeddings"]


def declared(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes that the configuration of a tied Llama promises."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{number}.{part}.weight": shape
        for number in range(config["num_hidden_layers"])
        for part, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = (config["vocab_size"], hidden)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


@folders
def test_weights_are_finite_and_have_the_declared_shapes(name: str) -> None:
    config = read(name, "config.json")
    assert config["tie_word_embeddings"] is True
    with safe_open(ASSETS / name / "model.safetensors", framework="numpy") as stored:
        found = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    assert {key: value.shape for key, value in found.items()} == declared(config)
    for key, value in found.items():
        assert value.dtype == np.dtype(getattr(ml_dtypes, config["torch_dtype"])), key
        assert np.isfinite(value.astype(np.float32)).all(), key
        if value.ndim > 1:  # norms may be all ones
            assert value.astype(np.float32).std() > 0, key


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    tokens = tokenizer()
    ids = tokens.encode(text).ids
    assert ids[0] == tokens.token_to_id("<|bos|>")
    if "<|" not in text and "tool_call>" not in text:
        assert tokens.decode(ids) == text


def test_every_byte_has_a_token() -> None:
    tokens = tokenizer()
    for text in ("żółć 中文 🙂‍↔️ \x00\x7f\xff\t\r\n", "日本語", "\N{ZERO WIDTH JOINER}"):
        assert tokens.decode(tokens.encode(text).ids) == text


def test_numbers_are_digits() -> None:
    tokens = tokenizer()
    assert [tokens.id_to_token(token) for token in tokens.encode("2048", add_special_tokens=False).ids] == list("2048")


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    words = read("demo", "tokenizer_config.json")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment.globals["raise_exception"] = refuse
    template = environment.from_string(words["chat_template"])
    return template.render(messages=messages, bos_token=words["bos_token"], **options)


def test_chat_template_renders_every_role() -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "L'Oslo"}}}
    text = render(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "sunny"},
        ],
        add_generation_prompt=True,
    )
    assert text == (
        "<|bos|><|system|>Be short.<|end|><|user|>Weather?<|end|>"
        '<|assistant|><tool_call>{"name": "get_weather", "arguments": {"city": "L\'Oslo"}}</tool_call><|end|>'
        "<|tool|>sunny<|end|><|assistant|>"
    )


def test_chat_template_offers_tools_after_the_system_message() -> None:
    function = {"name": "add", "description": "Add.", "parameters": {"properties": {"a": {}, "b": {}}}}
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1"}]
    text = render(messages, tools=[{"type": "function", "function": function}])
    assert text == "<|bos|><|system|>Be short.\nTools:\nadd(a, b): Add.<|end|><|user|>1 + 1<|end|>"
    assert render(messages[1:], tools=[{"type": "function", "function": {"name": "now"}}]) == (
        "<|bos|><|system|>Tools:\nnow(): <|end|><|user|>1 + 1<|end|>"
    )


def test_chat_template_refuses_an_unknown_role() -> None:
    with pytest.raises(ValueError, match="role judge is unknown"):
        render([{"role": "judge", "content": "guilty"}])


def test_role_marks_are_single_special_tokens() -> None:
    tokens = tokenizer()
    marks = ["<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
    assert tokens.encode("".join(marks), add_special_tokens=False).tokens == marks
    assert tokens.decode(tokens.encode("<|user|>Hi<|end|>").ids) == "Hi"
    assert tokens.decode(tokens.encode("<tool_call>{}</tool_call>").ids) == "<tool_call>{}</tool_call>"
