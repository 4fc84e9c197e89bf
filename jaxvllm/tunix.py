"""`JaxvllmRollout`: the engine as the sampler of tunix's trainers, in their process and with the actor's own arrays.

tunix 0.1.7 takes it as `ClusterConfig.rollout_engine=functools.partial(JaxvllmRollout, llm=llm)`. It needs
`google-tunix`, which no extra of jaxvllm installs: about a gigabyte.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import common
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.llm import LLM
from jaxvllm.flax import EngineModule
from jaxvllm.tunix_models import TunixModel


class TunixActor(EngineModule):
    """The module of an engine as tunix calls its models. Make one with `TunixActor.of(llm)`."""

    def __call__(  # type: ignore[override]
        self,
        input_tokens: jax.Array,
        positions: jax.Array,
        cache: None = None,
        attention_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        """Returns the logits f32[B, S, V] and no cache, for one sequence in each row.

        input_tokens, positions  # i32[B, S]
        attention_mask  # bool[B, S, S], causal; a token that does not see itself is padding
        """
        if cache is not None or attention_mask is None:
            raise ValueError(
                "an actor of an engine computes whole sequences, one in each row: give an attention_mask and no cache, "
                "and leave tunix's packing of sequences off"
            )
        is_real = jnp.diagonal(attention_mask, axis1=1, axis2=2)
        return self.logits(input_tokens, positions, is_real), None


class JaxvllmRollout(BaseRollout):  # type: ignore[misc]
    """Samples with an engine, which takes the actor's arrays before each batch if they have changed.

    A `TunixActor` holds the engine's own arrays, so that nothing is copied. A model of tunix's own is copied into the
    order of the engine's arrays, on the devices: see `jaxvllm.tunix_models`.
    """

    def __init__(
        self, *, llm: LLM, rollout_actor: Any, tokenizer: Any, mesh: Mesh, rollout_config: RolloutConfig
    ) -> None:
        """Is called by tunix with all but `llm`.

        Raises ValueError for an actor whose weights the engine cannot take, and for an engine that would report other
        log-probabilities than tunix's trainers compute.
        """
        self._weights: TunixActor | TunixModel
        if isinstance(rollout_actor, TunixActor):
            self._weights = rollout_actor
            if rollout_actor.mesh != mesh:
                raise ValueError(
                    f"tunix's mesh {mesh} is not the engine's, so that the actor was copied: give the mesh of "
                    "TunixActor.of(llm) to all roles"
                )
        else:
            self._weights = TunixModel.of(rollout_actor, llm)
        if llm.config.logprobs_mode != "processed_logprobs":
            raise ValueError(
                f"logprobs_mode of the engine is {llm.config.logprobs_mode}, and trainers of tunix compare with the "
                "distribution that was sampled from: start it with processed_logprobs"
            )
        self._llm, self._actor, self._tokenizer, self._mesh = llm, rollout_actor, tokenizer, mesh
        self._served: list[jax.Array] = []
        self._version: str | None = None  # of the engine's weights, when it took these

    @property
    def mesh(self) -> Mesh:
        """The mesh that tunix gave to this role."""
        return self._mesh

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """Completes each prompt. The tokens have the EOS, where it ended them, and the log-probabilities are of them.

        Each prompt has a seed of its own, so that equal ones get several answers. The end of a prompt that is longer
        than `max_prompt_length` is used.
        """
        self._serve()
        rows = [self._tokens(str(prompt))[-rollout_config.max_prompt_length :] for prompt in prompts]
        params = [self._params(rollout_config, number) for number in range(len(rows))]
        outputs = self._llm.generate(rows, params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        padded = np.full((len(rows), rollout_config.max_prompt_length), self.pad_id(), np.int32)
        for number, row in enumerate(rows):
            padded[number, padded.shape[1] - len(row) :] = row
        return RolloutOutput(
            text=[completion.text for completion in completions],
            logits=None,
            tokens=[np.asarray(completion.token_ids, np.int32) for completion in completions],
            left_padded_prompt_tokens=padded,
            logprobs=[_logprobs(completion.logprobs) for completion in completions],
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Returns log p of the completions' tokens, f32[B, C], as the trainer computes them."""
        graph, state = nnx.split(self._actor)
        ids = {"pad_id": self.pad_id(), "eos_id": self.eos_id()}
        logprobs: jax.Array = common.compute_per_token_logps(graph, state, prompt_tokens, completion_tokens, **ids)
        return logprobs

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Changes nothing: tunix calls it where actor and rollout are apart, and here they are one."""

    def pad_id(self) -> int:
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        return int(self._tokenizer.eos_id())

    def model(self) -> Any:
        """Returns the actor, so that tunix knows that its weights need not be sent."""
        return self._actor

    def _serve(self) -> None:
        """Lets the engine compute with the arrays that the actor has now."""
        arrays = jax.tree.leaves(nnx.state(self._actor, nnx.Param))
        is_served = len(arrays) == len(self._served) and all(a is b for a, b in zip(arrays, self._served, strict=True))
        # Somebody else may have given the engine other weights meanwhile.
        if not is_served or self._llm.weight_version != self._version:
            self._llm.update_weights(self._weights)
            self._served, self._version = arrays, self._llm.weight_version

    def _tokens(self, prompt: str) -> list[int]:
        tokens = self._llm.get_tokenizer().encode(prompt)
        # A chat template writes the BOS that a tokenizer would add.
        return tokens[1:] if len(tokens) > 1 and tokens[0] == tokens[1] == self._tokenizer.bos_id() else tokens

    def _params(self, config: RolloutConfig, number: int) -> SamplingParams:
        seed = None if config.seed is None else int(np.asarray(config.seed).ravel()[-1]) + number
        return SamplingParams(
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k is None else config.top_k,
            seed=seed,
            max_tokens=config.max_tokens_to_generate,
            stop_token_ids=config.eos_tokens,
            logprobs=0,
        )


def _logprobs(of_tokens: Sequence[Any] | None) -> np.ndarray:
    assert of_tokens is not None, "each request asks for them"
    return np.asarray([next(iter(of_token.values())).logprob for of_token in of_tokens], np.float32)
