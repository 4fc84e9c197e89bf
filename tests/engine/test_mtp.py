"""A model with an MTP layer in its checkpoint says the same with and without drafts, and drafts see its features."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.engine.tiny import (
    GREEDY,
    Recomputation,
    all_drafts_or_none,
    assert_idle,
    choose_drafts,
    few_pages,
    random_prompts,
    tiny_llm,
    write_tiny_checkpoint,
)
from tests.models.seeded_weights import seeded_weights

PROMPTS = random_prompts(8, longest=30, seed=5)
PARAMS = [replace(GREEDY, temperature=float(index % 2), seed=index) for index in range(len(PROMPTS))]
CIRCLE = 40 + np.arange(16)  # tokens of which each follows the one before
IN_CIRCLE = [np.roll(CIRCLE, shift)[:length].tolist() * 2 for shift, length in ((0, 16), (5, 16), (9, 3))]


def write_mimo(directory: Path) -> Path:
    """The tiny checkpoint as a MiMo: a Qwen 2 with biases, and two layers more.

    It says `CIRCLE` round and round. Its heads know so from the feature alone, and do not look at the token. The first
    reads of the feature what only the model writes, and the second what only the first writes.
    """
    write_tiny_checkpoint(directory)
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    biases = {
        name.replace("weight", "bias"): [len(tensor)]
        for name, tensor in tensors.items()
        if any(f".{x}_proj.weight" in name for x in "qkv") and "self_attn" in name
    }
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()} | biases
    E, first = config["hidden_size"], "model.layers.0."
    of_heads, added = "model.mtp_layers.", {}
    for start in (f"{of_heads}0.", f"{of_heads}1."):
        added |= {start + name.removeprefix(first): shape for name, shape in shapes.items() if name.startswith(first)}
        added |= {f"{start}{name}_layernorm.weight": [E] for name in ("token", "hidden", "final")}
        added[f"{start}input_proj.weight"] = [E, 2 * E]
    tensors |= seeded_weights(biases | added, 11, 0.0)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            tensor *= 0.01 if name.startswith(of_heads) else 0.1
    size = len(CIRCLE)
    one, at, following = np.eye(E, dtype=np.float32)[:size], np.arange(size), np.roll(np.arange(size), -1)
    tensors["model.embed_tokens.weight"][CIRCLE] = 20 * (one + np.roll(one, size, axis=1))
    tensors["lm_head.weight"][CIRCLE[following]] = one
    project = [tensors[f"{of_heads}{number}.input_proj.weight"] for number in range(2)]
    project[0][:] = project[1][:] = 0
    project[0][following, size + at] = project[0][2 * size + following, size + at] = 8
    project[1][following, 2 * size + at] = 8
    save_file(tensors, directory / "model.safetensors")
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_tokens_are_as_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = False
    choose_drafts(monkeypatch, lambda numbers: max(numbers) if drafts else 0)
    directory = write_mimo(tmp_path)
    config = {"method": "mtp", "num_speculative_tokens": 2}
    with all_drafts_or_none(bursts=False), tiny_llm(directory, speculative_config=config) as llm:

        def answers() -> list[list[int]]:
            return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]

        [replica], expected = llm.engine.replicas, answers()
        assert not replica.num_drafted.any()
        assert Recomputation(directory).is_greedy(PROMPTS[0], expected[0])
        drafts = True
        assert answers() == expected
        assert (replica.num_drafted > 0).all() and (replica.num_accepted <= replica.num_drafted).all()
        with few_pages(llm, 14):
            assert answers() == expected
        replica.num_drafted[:] = replica.num_accepted[:] = 0
        for output in llm.generate(IN_CIRCLE, GREEDY, use_tqdm=False):
            at = output.prompt_token_ids[-1] - CIRCLE[0] + 1
            assert output.outputs[0].token_ids == np.resize(np.roll(CIRCLE, -at), GREEDY.max_tokens).tolist()
        assert (replica.num_accepted == replica.num_drafted).all() and replica.num_drafted.all()
        assert_idle(llm)
