"""Samples with vLLM's build for CPUs, and computes the same log-probabilities with transformers.

It runs in the environment of `make .vllm/.stamp` (Python 3.11), and imports nothing of this repository. Standard
input has `{"model": DIR, "dtype": D, "trainer_dtype": D, "prompts": [[id, ...], ...], "max_tokens": N}`. Standard
output gets versions, and for each sampled token its log-probability by the engine and by the trainer.
"""

import json
import os
import sys
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
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes 25 s
}

import torch  # noqa: E402
import transformers  # noqa: E402
import vllm  # noqa: E402


def sampled(request: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    """Returns the sampled tokens of each prompt, and their log-probabilities."""
    llm = vllm.LLM(
        request["model"],
        skip_tokenizer_init=True,
        dtype=request["dtype"],
        max_model_len=128,
        max_num_seqs=len(request["prompts"]),
    )
    params = [
        vllm.SamplingParams(
            temperature=1.0, seed=seed, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=0, detokenize=False
        )
        for seed in range(len(request["prompts"]))
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    tokens = [list(answer.token_ids) for answer in answers]
    logprobs = [
        [at[token].logprob for token, at in zip(own, answer.logprobs, strict=True)]
        for own, answer in zip(tokens, answers, strict=True)
    ]
    return tokens, logprobs


@torch.no_grad()  # type: ignore[untyped-decorator]
def trained(request: dict[str, Any], tokens: list[list[int]]) -> list[list[float]]:
    """Returns the log-probabilities of the same tokens by transformers, with a softmax in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=getattr(torch, request["trainer_dtype"])
    ).eval()
    found = []
    for prompt, own in zip(request["prompts"], tokens, strict=True):
        logits = model(torch.tensor([[*prompt, *own]]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        found.append(torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(own)[:, None])[:, 0].tolist())
    return found


def main() -> None:
    request = json.load(sys.stdin)
    tokens, of_engine = sampled(request)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    answer = {"versions": versions, "engine": of_engine, "trainer": trained(request, tokens)}
    print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
