"""A GRPO run of tunix with our engine as its sampler: `tests.interop.tunix_run` prints one JSON object.

It runs in the environment `.tunix`. The embedded model learns to add better: about half of its answers are right.
"""

import functools
import json
import random
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.rl import rl_cluster as tunix
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from jaxvllm import LLM
from jaxvllm.model_name import resolve
from jaxvllm.tunix import JaxvllmRollout, TunixActor

STEPS, QUESTIONS, ANSWERS = 16, 8, 8


def main() -> None:
    sizes = dict(max_model_len=64, max_num_seqs=64, max_num_batched_tokens=256, num_pages=512)
    llm = LLM(dtype="float32", logprobs_mode="processed_logprobs", **sizes)
    actor = TunixActor.of(llm)
    tokenizer = AutoTokenizer.from_pretrained(resolve("demo"))
    rewards: list[float] = []

    def is_right(prompts: Any, completions: list[str], answer: Any, **_: Any) -> list[float]:
        found = [
            float(f" {one}." in text or text.endswith(f" {one}")) for one, text in zip(answer, completions, strict=True)
        ]
        rewards.append(float(np.mean(found)))
        return found

    def question(numbers: random.Random) -> tuple[str, int]:
        a, b = numbers.randint(24, 38), numbers.randint(14, 28)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a} plus {b}?"}], tokenize=False, add_generation_prompt=True
        )
        return text, a + b

    # The same questions in each step, whose rewards can so be compared.
    numbers = random.Random(0)
    texts, totals = zip(*(question(numbers) for _ in range(QUESTIONS)), strict=True)
    batches = [{"prompts": np.asarray(texts), "answer": np.asarray(totals)} for _ in range(STEPS)]
    roles = (tunix.Role.ACTOR, tunix.Role.REFERENCE, tunix.Role.ROLLOUT)
    cluster = tunix.RLCluster(
        actor=actor,
        reference=None,
        tokenizer=tokenizer,
        cluster_config=tunix.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, actor.mesh),
            rollout_engine=functools.partial(JaxvllmRollout, llm=llm),
            training_config=tunix.RLTrainingConfig(
                actor_optimizer=optax.adam(2e-4),
                eval_every_n_steps=10**6,
                max_steps=STEPS,
                data_sharding_axis=("data",),
            ),
            rollout_config=RolloutConfig(max_tokens_to_generate=16, max_prompt_length=32, temperature=1.0, seed=1),
        ),
    )
    before = jax.tree.leaves(actor.tree())
    config = GRPOConfig(num_generations=ANSWERS, num_iterations=1, beta=0.0)
    GRPOLearner(rl_cluster=cluster, algo_config=config, reward_fns=is_right).train(batches)
    after = jax.tree.leaves(actor.tree())
    rollout = cluster.rollout
    prompts = batches[0]["prompts"].tolist()
    output = rollout.generate(prompts, cluster.get_rollout_config(tunix.Mode.TRAIN))
    served = jax.tree.leaves(llm.weights)
    width = max(map(len, output.tokens))
    completions = np.full((len(prompts), width), rollout.pad_id(), np.int32)
    for number, tokens in enumerate(output.tokens):
        completions[number, : len(tokens)] = tokens
    of_trainer = np.asarray(rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions))
    drift = [float(np.abs(of_trainer[number, : len(own)] - own).max()) for number, own in enumerate(output.logprobs)]
    json.dump(
        {
            "rewards": rewards,
            "texts": output.text[:4],
            "ends": [int(tokens[-1]) for tokens in output.tokens],
            "eos": rollout.eos_id(),
            "drift": max(drift),
            "changed": sum(a is not b for a, b in zip(before, after, strict=True)),
            "aliased": sum(
                a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer() for a, b in zip(after, served, strict=True)
            ),
            "arrays": len(after),
            "params": len(jax.tree.leaves(nnx.state(actor, nnx.Param))),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
