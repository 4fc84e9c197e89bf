"""Runs transformers as a worker, on a GPU if there is one: JSON requests on stdin, one JSON answer a line on stdout.

It runs in any environment with torch, such as that of `make oracle` (Python 3.11), and imports nothing of this project.
Requests: `{"load": DIR, "threads": N, "dtype": D, "context": T, "requests": R}` reads the checkpoint in DIR, or makes
random weights where DIR has a config.json alone, and answers with versions and settings; `{"prompts": [[id, ...], ...],
"max_tokens": [N, ...]}` generates greedily, end-of-text ignored, and answers with seconds, seconds to the first token
and the tokens of each prompt. Prompts and answers are of one length: a static batch, nothing padded, which is
transformers at its best.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = "sdpa"


class FirstTokenClock:
    """A stopping criterion that never stops generation, and remembers the time of its first call."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.first is None:
            input_ids.cpu()  # waits for a GPU
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def load(directory: str, threads: int, dtype: str) -> Any:
    torch.set_num_threads(threads)
    torch.set_default_device(DEVICE)
    if dtype == "auto":
        dtype = "bfloat16" if DEVICE != "cuda" or torch.cuda.get_device_capability() >= (8, 0) else "float16"
    options = {"dtype": getattr(torch, dtype), "attn_implementation": ATTENTION}
    if any(Path(directory).glob("*.safetensors")):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    else:
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
    model = model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(model: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    ids = torch.tensor(prompts)
    clock = FirstTokenClock()
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        ).cpu()
    seconds = time.perf_counter() - start
    assert clock.first is not None
    tokens = output[:, ids.shape[1] :].tolist()
    return {"seconds": seconds, "first_token_seconds": clock.first - start, "tokens": tokens}


def main() -> None:
    model: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if "load" in request:
            model = load(request["load"], request["threads"], request["dtype"])
            versions = {"transformers": transformers.__version__, "torch": torch.__version__}
            answer: dict[str, Any] = {"versions": versions, "settings": {"attn_implementation": ATTENTION}}
        else:
            answer = generate(model, request["prompts"], request["max_tokens"][0])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
