"""Do models give the same by this device's kernels as by plain XLA? Families of every kind of layer, random weights.

Each family has a few layers, of sizes that the kernels take. Two engines complete the same prompts, one by the device's
kernels and one by plain XLA, and the log-probabilities of each token are compared, up to the first token in which the
engines differ. Plain XLA of GPUs refuses int4, so it is not among them. In bfloat16 two tokens may be equally likely,
and a router may choose another expert.

    python -m benchmarks.family_parity [NAME ...]

It prints one JSON object a family.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.qwen3 import qwen3, qwen3_moe
from jaxvllm import LLM, SamplingParams

# The longest prompt fills a step in which states go by chunks, and goes on in the next one.
VOCABULARY, PROMPTS, OUTPUT = 4096, (5, 200, 1500), 16
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
_LATENTS = {
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}


def _family(architecture: str, model_type: str, **sizes: Any) -> dict[str, Any]:
    return _COMMON | {"architectures": [architecture], "model_type": model_type} | sizes


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": qwen3(3, 1024, 2048, 16, 4, 128, VOCABULARY),
    "qwen3-int8": qwen3(3, 1024, 2048, 16, 4, 128, VOCABULARY),
    "qwen3-fp8": qwen3(3, 1024, 2048, 16, 4, 128, VOCABULARY),
    "qwen3-moe": qwen3_moe(3, 1024, 256, 16, 4, 16, 4, 128, VOCABULARY),
    "qwen3-moe-int8": qwen3_moe(3, 1024, 256, 16, 4, 16, 4, 128, VOCABULARY),
    "gemma3": _family("Gemma3ForCausalLM", "gemma3_text", num_hidden_layers=7, head_dim=256, sliding_window=128),
    "gpt-oss": _family(
        "GptOssForCausalLM", "gpt_oss", num_hidden_layers=4, head_dim=64, intermediate_size=256, num_local_experts=16,
        num_experts_per_tok=4, sliding_window=128,
    ),
    "deepseek-v3": _family(
        "DeepseekV3ForCausalLM", "deepseek_v3", num_hidden_layers=3, **_LATENTS, q_lora_rank=512, n_routed_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=256, n_shared_experts=1, n_group=4, topk_group=2,
    ),
    "qwen3-next": _family(
        "Qwen3NextForCausalLM", "qwen3_next", num_hidden_layers=4, full_attention_interval=4, **_EXPERTS,
        shared_expert_intermediate_size=256, linear_num_key_heads=8, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    ),
    "kimi-linear": _family(
        "KimiLinearForCausalLM", "kimi_linear", num_hidden_layers=4, **_LATENTS, q_lora_rank=None, mla_use_nope=True,
        model_max_length=4096, moe_intermediate_size=256, moe_renormalize=True, num_experts=16, num_expert_group=1,
        topk_group=1, num_experts_per_token=4, num_shared_experts=1,
        linear_attn_config={
            "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 8,
            "short_conv_kernel_size": 4,
        },
    ),
    "nemotron-h": _family(
        "NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M-M*", ssm_state_size=128, mamba_num_heads=32,
        mamba_head_dim=64, n_groups=8, conv_kernel=4,
    ),
    "jamba": _family(
        "JambaForCausalLM", "jamba", num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, expert_layer_period=2,
        expert_layer_offset=1, attn_layer_period=4, attn_layer_offset=3, mamba_d_state=16, mamba_d_conv=4,
        mamba_dt_rank=64, mamba_expand=2,
    ),
    "lfm2": _family(
        "Lfm2ForCausalLM", "lfm2", num_hidden_layers=4, full_attn_idxs=[3], conv_L_cache=3, conv_bias=False,
        block_auto_adjust_ff_dim=False,
    ),
}  # fmt: skip


def completed(name: str, backend: str) -> list[Any]:
    """Returns the outputs of one engine."""
    options: dict[str, Any] = {"quantization": name.rsplit("-", 1)[1]} if name.endswith(("int8", "fp8")) else {}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(FAMILIES[name]))
        llm = LLM(
            model=directory, load_format="dummy", dtype="bfloat16", max_model_len=2048, max_num_seqs=4,
            max_num_batched_tokens=1024, row_buckets=(4,), token_buckets=(1024,), page_size=64, num_pages=100,
            attention_backend=backend, max_decode_burst=1, compilation_cache="", **options,
        )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts: list[Any] = [{"prompt_token_ids": rng.integers(3, VOCABULARY, length).tolist()} for length in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, logprobs=4, ignore_eos=True, detokenize=False)
    with llm:
        return [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]


def compared(name: str) -> dict[str, Any]:
    """Returns the tokens that both engines have, and the largest difference of a log-probability until they differ."""
    by_kernels, by_xla = completed(name, "auto"), completed(name, "reference")
    equal, largest, spread = [], 0.0, []
    for own, other in zip(by_kernels, by_xla, strict=True):
        pairs = zip(own.token_ids, other.token_ids, strict=True)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), OUTPUT)
        equal.append(same)
        for ours, theirs in list(zip(own.logprobs, other.logprobs, strict=True))[: same + 1]:
            for token in ours.keys() & theirs.keys():
                largest = max(largest, abs(ours[token].logprob - theirs[token].logprob))
            spread.append(max(one.logprob for one in theirs.values()))
    return {"equal_tokens": equal, "of": OUTPUT, "largest_difference": largest, "likeliest": max(spread)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    names = parser.parse_args().names or [*FAMILIES]
    if unknown := {*names} - {*FAMILIES}:
        parser.error(f"no family is called {', '.join(sorted(unknown))}")
    for fact in facts(names):
        print(json.dumps(fact), flush=True)


def facts(names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        try:
            yield {"what": name} | compared(name)
        except Exception as problem:
            yield {"what": name, "problem": f"{type(problem).__name__}: {str(problem)[:600]}"}


if __name__ == "__main__":
    main()
