"""Computes with transformers the logits of checkpoints, for `tools.check_written_checkpoints`.

    .oracle/bin/python -m tools.transformers_logits PROMPTS.json LOGITS.npz

PROMPTS.json has the prompts of each directory, lists of token ids. LOGITS.npz gets the logits f32[prompts, V] at the
last position of each prompt, by the directory, and standard output the version of transformers.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers

from tools.make_fixtures import CONFIGS, attention_of, fix_rope


@torch.no_grad()  # type: ignore[untyped-decorator]
def logits(directory: str, prompts: list[list[int]]) -> np.ndarray:
    """Returns the logits of a checkpoint in the folder of its fixture's name.

    Raises ValueError if a tensor has no place, or a place no tensor.
    """
    family, _ = CONFIGS[Path(directory).parent.name]
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation=attention_of(family), dtype=torch.float32, output_loading_info=True
    )
    wrong = {
        key: sorted(names) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if (names := report[key])
    }
    if wrong:
        raise ValueError(f"{directory}: {wrong}")
    fix_rope(model.eval())
    rows = [model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float().numpy() for prompt in prompts]
    return np.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("logits", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    prompts = json.loads(args.prompts.read_text())
    np.savez(args.logits, **{directory: logits(directory, prompts[directory]) for directory in prompts})
    print(transformers.__version__)


if __name__ == "__main__":
    main()
