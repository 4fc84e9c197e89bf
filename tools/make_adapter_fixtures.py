"""Writes the adapters of tests/fixtures: what PEFT saves of parameters of experts, and what it computes with that.

    .oracle/bin/python -m pip install --no-deps peft==0.21.2 accelerate==1.15.0  # to a copy of the environment
    .oracle/bin/python tools/make_adapter_fixtures.py

Numbers are not stored: tests/models/seeded_weights.py makes those of the model and of the adapter again.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.seeded_weights import seeded_weights  # noqa: E402
from tools.make_fixtures import FIXTURES, loaded  # noqa: E402

SEED = 7
# The parameters that an adapter has. PEFT exchanges A and B for those of Llama 4.
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTERS = {
    "qwen3_moe": [*EXPERTS, "mlp.gate.weight"],
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS,
    "llama4": ["experts.down_proj"],
}


@torch.no_grad()  # type: ignore[untyped-decorator]
def make(name: str) -> None:
    """Writes the shapes of an adapter, its config, and the logits after each prompt."""
    directory = FIXTURES / name
    expected = json.loads((directory / "expected.json").read_text())
    weights = seeded_weights(expected["shapes"], expected["seed"], expected["norm_offset"])
    model = loaded(directory, weights, "eager")
    stated = LoraConfig(r=3, lora_alpha=6, target_modules=["o_proj"], target_parameters=ADAPTERS[name])
    adapted = get_peft_model(model, stated).eval()
    shapes = {key: [*tensor.shape] for key, tensor in get_peft_model_state_dict(adapted).items()}
    tensors = {key: torch.from_numpy(own) for key, own in seeded_weights(shapes, SEED, 0).items()}
    set_peft_model_state_dict(adapted, tensors)
    logits = [adapted(torch.tensor([prompt]), use_cache=False).logits[0, -1].numpy() for prompt in expected["prompts"]]
    with tempfile.TemporaryDirectory() as saved:
        adapted.save_pretrained(saved)
        config = json.loads(Path(saved, "adapter_config.json").read_text())
    record = {"seed": SEED, "config": config | {"base_model_name_or_path": None}, "shapes": shapes}
    (directory / "adapter.json").write_text(json.dumps(record) + "\n")
    np.savez_compressed(directory / "adapter.npz", logits=np.stack(logits))
    print(f"{name}: the adapter changes logits by up to {np.abs(np.stack(logits) - plain_logits(name)).max():.2f}")


def plain_logits(name: str) -> np.ndarray:
    """Returns the logits of the model itself."""
    with np.load(FIXTURES / name / "expected.npz") as arrays:
        logits: np.ndarray = arrays["logits"]
    return logits


if __name__ == "__main__":
    torch.set_num_threads(1)
    for fixture in ADAPTERS:
        make(fixture)
