"""Checks that others read what `jaxvllm convert --format compressed-tensors` writes.

    make .vllm/.stamp && python -m tools.check_quantized_conversion [QUANTIZATION ...]

The embedded model is converted in each quantization. Then the package compressed-tensors decompresses its matrices,
whose values must be exactly those that we read, and vLLM's build for CPUs answers three prompts with it. Its tokens are
printed beside ours: both engines round activations differently, so they need not be the same to the last one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from jaxvllm import LLM, SamplingParams
from jaxvllm.cli.convert import QUANTIZATIONS, main
from jaxvllm.models.published import published_encoding
from jaxvllm.models.published.encoded_files import EncodedFiles
from jaxvllm.models.safetensors_files import open_weights
from jaxvllm.models.weight_names import Source

ROOT = Path(__file__).resolve().parent.parent
PEER = (ROOT / ".vllm" / "bin" / "python", ROOT / "benchmarks" / "peers" / "vllm_quantized.py")
SAME = 0.5  # of the tokens, at least


def check(quantization: str, directory: Path) -> None:
    """Converts, and raises AssertionError if a value is another one, or few tokens are the same."""
    model, values = directory / quantization, directory / f"{quantization}.safetensors"
    flags = ("--format", "compressed-tensors", "--quantization", quantization)
    assert main(["--model", "demo", "--output", str(model), *flags]) == 0
    # vLLM must not see our packages.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*map(str, PEER), str(model), str(values)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    answer = json.loads(done.stdout)
    config = json.loads((model / "config.json").read_text())
    encoding = published_encoding(config)
    assert encoding is not None
    tensors = EncodedFiles.of(open_weights(model), encoding)
    theirs = load_file(values)
    for name, matrix in theirs.items():
        ours = np.zeros_like(matrix)
        tensors.fill(Source(name, matrix.shape, (0, 0), matrix.shape))(ours, (0, 0))
        np.testing.assert_array_equal(ours, matrix, err_msg=name)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    with LLM(model=str(model), max_model_len=128, max_num_seqs=4) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in answer["prompts"]]
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    mine, other = np.array(tokens), np.array(answer["tokens"])
    same = int((mine == other).sum())
    print(f"{quantization}: {len(theirs)} matrices have the same values, {same} of {mine.size} tokens are vLLM's")
    print(f"  vLLM {answer['versions']['vllm']}: {other.tolist()}\n  jaxvllm: {mine.tolist()}")
    assert len(theirs) == 7 * config["num_hidden_layers"] and same > SAME * mine.size


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for one in sys.argv[1:] or [name for name in QUANTIZATIONS if name != "int4"]:
            check(one, Path(made))
