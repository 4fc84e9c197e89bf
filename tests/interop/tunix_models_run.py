"""tunix's own models as actors of our engine: `tests.interop.tunix_models_run` prints one JSON object.

It runs in the environment `.tunix`, on two virtual devices. Each tiny model has random weights, which an engine takes
twice. Then both tell the log-probabilities of what the engine has sampled.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl.rollout.base_rollout import RolloutConfig

from jaxvllm import LLM
from jaxvllm.model_name import DEMO_MODEL
from jaxvllm.tunix import JaxvllmRollout
from tests.quick import quick_engines

PROMPTS = ["Once upon a time", "The fox", "What is 24 plus 17?", "In the forest there was"]
BASE = dict(
    vocab_size=2048,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
)
SIZES = dict(embed_dim=48, hidden_dim=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
NAMED = SIZES | dict(vocab_size=2048, norm_eps=1e-6)
GEMMA = SIZES | dict(num_embed=2048)
TANH = dict(hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)
LOCAL, GLOBAL = gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL


@dataclass(frozen=True)
class Case:
    """A config.json, and the model of tunix that has its weights."""

    architecture: str
    config: dict[str, Any]
    make: Callable[[], nnx.Module]


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


LLAMA = Case(
    "Llama",
    dict(rope_theta=1e6),
    # Its attention does not read the base of its config, and takes 1,000,000.
    lambda: llama3.Llama3(llama3.ModelConfig(**NAMED, rope_theta=500_000), rngs=rngs()),
)
CASES = {
    "llama3": LLAMA,
    "qwen2": Case(
        "Qwen2",
        dict(rope_theta=2e4, tie_word_embeddings=True),
        lambda: qwen2.Qwen2(qwen2.ModelConfig(**NAMED, rope_theta=20_000, use_tied_embedding=True), rngs=rngs()),
    ),
    "qwen3": Case(
        "Qwen3",
        dict(rope_theta=1e6),
        lambda: qwen3.Qwen3(qwen3.ModelConfig(**NAMED, rope_theta=1_000_000), rngs=rngs()),
    ),
    "qwen3_moe": Case(
        "Qwen3Moe",
        dict(
            rope_theta=1e6,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        lambda: qwen3.Qwen3(
            qwen3.ModelConfig(
                **NAMED | dict(hidden_dim=32), rope_theta=1_000_000, num_experts=4, num_experts_per_tok=2
            ),
            rngs=rngs(),
        ),
    ),
    "gemma": Case(
        "Gemma",
        TANH | dict(num_key_value_heads=4),
        lambda: gemma.Gemma(
            gemma.ModelConfig(
                **GEMMA | dict(num_kv_heads=4),
                final_logit_softcap=None,
                use_post_attn_norm=False,
                use_post_ffw_norm=False,
                attention_types=(GLOBAL, GLOBAL),
            ),
            rngs=rngs(),
        ),
    ),
    "gemma2": Case(
        "Gemma2",
        TANH
        | dict(sliding_window=8, query_pre_attn_scalar=16, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        lambda: gemma.Gemma(
            gemma.ModelConfig(
                **GEMMA,
                final_logit_softcap=30.0,
                use_post_attn_norm=True,
                use_post_ffw_norm=True,
                attention_types=(LOCAL, GLOBAL),
                attn_logits_soft_cap=50.0,
                sliding_window_size=8,
            ),
            rngs=rngs(),
        ),
    ),
    "gemma3": Case(
        "Gemma3",
        TANH
        | dict(
            num_hidden_layers=6,
            sliding_window=8,
            query_pre_attn_scalar=16,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        lambda: gemma3.Gemma3(
            gemma3.ModelConfig(
                **GEMMA | dict(num_layers=6),
                sliding_window_size=8,
                global_base_frequency=1_000_000,
                global_scale_factor=8.0,
                param_dtype=jnp.float32,
            ),
            rngs=rngs(),
        ),
    ),
}


class Tokenizer:
    """What a rollout asks of tunix's adapter of a tokenizer."""

    def pad_id(self) -> int:
        return 2

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        return 0


def engine(case: Case, folder: Path, **options: Any) -> LLM:
    """An engine of random weights, with the tokenizer of the embedded model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = BASE | dict(architectures=[f"{case.architecture}ForCausalLM"], eos_token_id=1, bos_token_id=0)
    (folder / "config.json").write_text(json.dumps(config | case.config))
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    sizes = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, num_pages=33, row_buckets=(4,))
    return LLM(
        model=str(folder),
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        token_buckets=(32,),
        max_decode_burst=1,
        attention_backend="reference",
        **sizes | dict(dtype="float32") | options,
    )


def randomize(model: nnx.Module, seed: int) -> None:
    """Gives each parameter random numbers: tunix begins with zeros in many of them."""
    state = nnx.state(model, nnx.Param)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    scaled = [
        jax.device_put(0.3 * jax.random.normal(key, leaf.shape, leaf.dtype), leaf.sharding)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(structure, scaled))


def logprobs(model: Any, rows: list[list[int]]) -> np.ndarray:
    """Returns log p of each token of each row but the first, by tunix's model."""
    width = 64
    tokens = np.zeros((len(rows), width), np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (len(rows), width, width))
    logits, _ = nnx.jit(lambda model, *given: model(given[0], given[1], None, given[2]))(model, tokens, positions, mask)
    values = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return np.asarray(jnp.take_along_axis(values, tokens[:, 1:, None], axis=-1)[..., 0])


def drift(rollout: JaxvllmRollout, model: Any, llm: LLM) -> float:
    """Samples, and returns the largest difference of a log-probability."""
    output = rollout.generate(
        PROMPTS, RolloutConfig(max_tokens_to_generate=24, max_prompt_length=32, temperature=1.0, seed=1)
    )
    prompts = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    rows = [[*prompt, *tokens] for prompt, tokens in zip(prompts, output.tokens, strict=True)]
    found = logprobs(model, [[int(token) for token in row] for row in rows])
    return max(
        float(np.abs(found[number, len(prompt) - 1 : len(row) - 1] - own).max())
        for number, (prompt, row, own) in enumerate(zip(prompts, rows, output.logprobs, strict=True))
    )


def measure(
    case: Case, folder: Path, refused: Mapping[str, Callable[[], nnx.Module]] | None = None, **options: Any
) -> tuple[list[float], dict[str, str]]:
    """Returns the drift with the first weights, and with others that the model has got meanwhile.

    The errors of models that the engine refuses follow.
    """
    model = case.make()
    with engine(case, folder, **options) as llm:
        rollout = rollout_of(model, llm)
        drifts = []
        for seed in (1, 2):
            randomize(model, seed)
            drifts.append(drift(rollout, model, llm))
        errors = {}
        for name, make in (refused or {}).items():
            try:
                rollout_of(make(), llm)
            except ValueError as error:
                errors[name] = str(error)
    return drifts, errors


def rollout_of(model: Any, llm: LLM) -> JaxvllmRollout:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return JaxvllmRollout(llm=llm, rollout_actor=model, tokenizer=Tokenizer(), mesh=mesh, rollout_config=None)


def on_two_devices() -> nnx.Module:
    """Returns a Llama whose matrices are divided among two devices along the last dimension."""
    model = LLAMA.make()
    mesh = jax.make_mesh((2,), ("fsdp",), (jax.sharding.AxisType.Auto,))
    graph, state = nnx.split(model)

    def placed(array: jax.Array) -> jax.Array:
        spec = jax.sharding.PartitionSpec(*(None,) * (array.ndim - 1), "fsdp")
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))

    return nnx.merge(graph, jax.tree.map(placed, state))


def with_lora() -> nnx.Module:
    model: Any = LLAMA.make()
    model.layers[0].attn.q_proj.w_lora_a = nnx.Param(jnp.zeros((48, 4)))
    return model


def wider() -> nnx.Module:
    return llama3.Llama3(llama3.ModelConfig(**NAMED | dict(hidden_dim=128), rope_theta=1_000_000), rngs=rngs())


def with_another_rope() -> nnx.Module:
    model: Any = CASES["gemma3"].make()
    model.layers[5].attn.rope_scale_factor = 1.0
    return model


def main() -> None:
    refused = {
        "llama3": {"lora": with_lora, "size": wider, "family": CASES["qwen3"].make},
        "gemma3": {"rope": with_another_rope},
    }
    drifts, errors = {}, {}
    with quick_engines(), tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, case in CASES.items():
            drifts[name], told = measure(case, folder / name, refused.get(name))
            errors |= told
        drifts["two devices"], _ = measure(replace(LLAMA, make=on_two_devices), folder / "two", mesh="1x2")
        rounded, _ = measure(LLAMA, folder / "rounded", quantization="int8")
    json.dump({"drift": drifts, "rounded": rounded, "errors": errors}, sys.stdout)


if __name__ == "__main__":
    main()
