"""Reads a checkpoint of compressed-tensors with that package, and answers prompts with vLLM's build for CPUs.

    .vllm/bin/python benchmarks/peers/vllm_quantized.py CHECKPOINT VALUES

It runs in the environment of `make fixtures-vllm`, and imports nothing of this repository. The values of all quantized
matrices go to the safetensors file VALUES, in float32. The greedy tokens are one line of JSON on stdout.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# vLLM writes to stdout while it loads; the answer has the real one for itself.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

import torch  # noqa: E402
import vllm  # noqa: E402
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

PROMPTS = ("Once upon a time", "The capital of", "Long ago, in a castle")


def values(directory: Path) -> dict[str, Any]:
    """Returns the matrices whose scales the checkpoint has, as compressed-tensors decompresses them."""
    config = QuantizationConfig(**json.loads((directory / "config.json").read_text())["quantization_config"])
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.load_from_registry(config.format)
    tensors = load_file(directory / "model.safetensors")
    found = {}
    for name in tensors:
        base, end = name.removesuffix("weight_scale"), "weight_scale"
        if name.endswith(end):
            own = {key.removeprefix(base): value for key, value in tensors.items() if key.startswith(base)}
            own[end] = own[end].float()
            found[f"{base}weight"] = compressor.decompress(own, scheme)["weight"].float()
    return found


def main() -> None:
    directory, into = map(Path, sys.argv[1:])
    save_file(values(directory), into)
    torch.set_num_threads(1)
    llm = vllm.LLM(str(directory), dtype="bfloat16", max_model_len=512, max_num_seqs=4, enforce_eager=True)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    answer = {
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "prompts": [list(output.prompt_token_ids) for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
