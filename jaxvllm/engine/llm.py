"""`LLM`: offline inference, with the names and meanings of vLLM's `LLM`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import batched, count
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from jaxvllm.config import EngineConfig
from jaxvllm.core.beam import BeamSearchParams
from jaxvllm.core.lora import LoRARequest
from jaxvllm.core.pause import PauseMode, SleepTag
from jaxvllm.core.pooler import Pooling
from jaxvllm.core.pooling_params import PoolingParams
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.core.weight_version import KVChange
from jaxvllm.engine.engine import Engine
from jaxvllm.engine.new_weights import WeightSource
from jaxvllm.engine.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
)
from jaxvllm.engine.page_view import PoolView
from jaxvllm.models.params import Params
from jaxvllm.runtime.logits_processors import LogitsProcessor
from jaxvllm.text.prompts import PromptLike
from jaxvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

type Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """An engine and a model in this process. All prompts of a call run as one continuous batch of each replica."""

    def __init__(self, model: str = "demo", *, logits_processors: Sequence[LogitsProcessor] = (), **options: Any):
        """Loads `model`. `options` are the fields of `EngineConfig`; a TypeError names an unknown one.

        `logits_processors` are functions that change the logits of every request, in the order given, after the
        penalties and in front of the temperature: `(logits f32[R, V], TokensSoFar) -> f32[R, V]`. JAX compiles them
        into the steps, so bursts of several steps go through them too.
        """
        self._start(EngineConfig.from_options(model=model, **options), tuple(logits_processors))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Loads the model of `config`."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig, logits_processors: tuple[LogitsProcessor, ...] = ()) -> None:
        self.config = config
        self.engine = Engine(config, logits_processors=logits_processors)
        self._request_ids = count()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Completes the prompts and returns their outputs in the order given.

        A prompt is a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids` and perhaps a
        `cache_salt`. With `enable_prompt_embeds` the mapping may have `prompt_embeds` instead, an array of floats with
        a row for each position, which takes the place of the token's embedding.

        Give one `sampling_params` for all prompts, or one for each. Everything is checked before anything is queued, so
        a ValueError, which names the prompt's index, leaves the engine as it was.

        `lora_request` names the adapter of all prompts, or of each one; None is the model itself.
        """
        listed = _as_list(prompts)
        return self._complete(self._check(listed, sampling_params, priority, lora_request=lora_request), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Completes one conversation (a list of messages) or several, rendered by the model's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(list[Conversation], [messages] if one else list(messages))
        tokenizer = self.get_tokenizer()
        texts = [
            tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        # The chat template writes the special tokens itself.
        requests = self._check(texts, sampling_params, None, add_special_tokens=False, lora_request=lora_request)
        return self._complete(requests, use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Searches for the most likely continuations of each prompt, and returns what it found in the order given.

        Prompts are those of `generate`. At most `concurrency_limit` of them are searched at once.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, not {type(params).__name__}")
        if concurrency_limit is not None and concurrency_limit < 1:
            raise ValueError(f"concurrency_limit must be at least 1, not {concurrency_limit}")
        search = replace(params, include_stop_str_in_output=True)
        like = SamplingParams(logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        requests = self._check(_as_list(prompts), search.sampling_params(like), None, beam_search=search)
        size = concurrency_limit or max(len(requests), 1)
        return [
            self._found(output) for some in batched(requests, size) for output in self._complete(list(some), use_tqdm)
        ]

    def _found(self, output: RequestOutput) -> BeamSearchOutput:
        tokenizer = self.engine.tokenizer
        sequences = []
        for completion in output.outputs:
            tokens = [*output.prompt_token_ids, *completion.token_ids]
            text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    logprobs=list(completion.logprobs or ()),
                    cum_logprob=completion.cumulative_logprob or 0.0,
                    text=text,
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                )
            )
        return BeamSearchOutput(sequences)

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns one vector f32[dimensions] for each prompt, in the order given, computed with the model's own layers.

        Prompts are those of `generate`. A vector is the hidden state of the prompt's last token, or the mean over all
        tokens, as the checkpoint or `pooler_config` says. It is cut to `dimensions` first and gets length 1 then. Give
        one `pooling_params` for all prompts, or one for each. Raises ValueError, which names the prompt's index.
        """
        listed = _as_list(prompts)
        given = PoolingParams() if pooling_params is None else pooling_params
        params = [given] * len(listed) if isinstance(given, PoolingParams) else list(given)
        if len(params) != len(listed):
            raise ValueError(
                f"{len(params)} pooling_params for {len(listed)} prompts: give one for each, or one for all"
            )
        poolings = [self.engine.pooler.resolve(one) for one in params]
        sampling = [Pooling.sampling_params(one.truncate_prompt_tokens) for one in params]
        requests = self._check(listed, sampling, priority, poolings=poolings, lora_request=lora_request)
        outputs = self._complete(requests, use_tqdm)
        return [_embedding(output) for output in outputs]

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Completes one prompt and yields an output after every step: all so far, or news with `output_kind` DELTA."""
        [request] = self._check([prompt], sampling_params, None, final_only=False, lora_request=lora_request)
        return self._run([request])

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. Raises ValueError when its directory has none."""
        if self.engine.tokenizer is None:
            raise ValueError("the model directory has no tokenizer.json: set tokenizer, or use token ids")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that `generate` uses when it gets none: those that the checkpoint recommends."""
        return self.engine.defaults.params

    def pages(self, replica: int = 0) -> PoolView:
        """Returns a snapshot of a replica's page pool and its running requests' pages. Print it to see a picture."""
        count = len(self.engine.replicas)
        if not 0 <= replica < count:
            raise ValueError(
                f"replica {replica} is not one of the {count} of mesh {self.config.mesh}: they count from 0"
            )
        return PoolView.take(self.engine.replicas[replica].scheduler)

    def expert_loads(self) -> dict[int, NDArray[np.int64]]:
        """Returns how many tokens have chosen each expert: see `Engine.expert_loads`."""
        return self.engine.expert_loads()

    def wait_until_compiled(self) -> None:
        """Waits until every bucket is compiled. Nothing compiles afterwards."""
        self.engine.wait_until_compiled()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets every cached prefix, so that the next prompts are computed from their first token. Returns True.

        With `reset_connector`, pages that `kv_transfer_config` keeps outside of the pool are forgotten as well. With
        `reset_running_requests`, requests that run compute all their tokens again.
        """
        return self.engine.reset_prefix_cache(reset_running_requests, reset_connector)

    @property
    def weights(self) -> Params:
        """The weights as they are on the devices of the first replica: nested dicts and lists of arrays."""
        return self.engine.weights

    def update_weights(
        self, source: WeightSource | str, version: str | None = None, kv: KVChange = "drop", partial: bool = False
    ) -> str:
        """Replaces the weights, as a trainer does between two rounds of generation. Nothing is compiled again.

        `source` has arrays of NumPy or jax by the names that a checkpoint of this model has, such as
        `model.layers.0.mlp.down_proj.weight`, or is a tree like `LLM.weights`, something that holds such a tree, or the
        directory of a checkpoint. With `partial` it is a part of that, and all other arrays stay. All are checked
        first: after an error the old ones are in place.

        Returns the name of the new weights, which outputs tell: `version`, or the number of the update. With `kv` drop,
        requests that run compute all their tokens again. With keep they go on with the keys and values that they have.
        Cached prefixes are forgotten. For the rest see `Engine.update_weights`.
        """
        return self.engine.update_weights(Path(source) if isinstance(source, str) else source, version, kv, partial)

    @property
    def weight_version(self) -> str:
        """The name of the weights that the next step computes with: `default` for those of the start, as in vLLM."""
        return self.engine.weight_version.name

    def update_lora(self, lora_request: LoRARequest, tensors: Mapping[str, Any]) -> None:
        """Replaces the content of an adapter, as a trainer of adapters does between two rounds. Nothing is compiled.

        `tensors` are arrays of NumPy or jax by the names that PEFT gives them in a file, such as
        `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`. The adapter_config.json in `lora_path` tells
        their ranks and scales. Modules that are not given are no longer adapted. Or they are a whole tree like
        `lora_weights`, to which that config adds nothing.

        Requests that run go on with the old content. New ones get the new one, and find no cached page of the old one.
        Raises ValueError and NotImplementedError for what is no adapter of this model. Then the old content stays.
        """
        self.engine.adapters.update(lora_request, tensors)

    def lora_weights(self, lora_request: LoRARequest) -> dict[str, Any]:
        """Returns a copy of the arrays of an adapter as one slot of the engine has them, in the memory of the host.

        The tree has `layers` and `outside` (the embedding and the LM head), and its layout is that of `weights`. Each
        matrix M has `lora_a_M`, which is A of all its parts, `lora_b_M`, which is B times the scale of the adapter, and
        `lora_ratio_M`, which has the lengths of rows that DoRA states, or zeros. Where the adapter has an embedding or
        an LM head whole, they are in `tables`. Ranks are filled up to `max_lora_rank`, and heads lie as the mesh has
        them, so a tree is for engines of one mesh and rank.
        Raises ValueError and NotImplementedError for what is no adapter of this model.
        """
        return self.engine.adapters.tree(lora_request)

    def update_weight_version(self, version: str) -> None:
        """Gives the weights that the engine has another name, which outputs tell from the next step on.

        Raises ValueError for a name that is no text of 1 to 256 characters.
        """
        self.engine.name_weights(version)

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops computing until `resume`, and returns when no step is under way. `generate` raises meanwhile.

        An open stream ends with the finish reason `abort` (mode abort), is computed to its end, which it tells when it
        is read (wait), or goes on after `resume` (keep). Unless requests are kept, `clear_cache` forgets every prefix.
        """
        self.engine.pause(mode)
        self.engine.settle()
        if clear_cache and mode != "keep":
            self.engine.reset_prefix_cache()

    def resume(self) -> None:
        """Computes again after a `pause`. Raises ValueError while weights or pages are not on the devices."""
        self.engine.resume()

    def is_paused(self) -> bool:
        """Returns whether `generate` would raise because of a pause."""
        return self.engine.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses, as `pause` does, and gives back memory of the devices, as `Engine.sleep` says.

        Level 0 gives back none, 1 that of KV pages and weights, which go to the host's memory, and 2 drops the weights.
        """
        self.engine.check_sleep(level)  # before the pause ends requests
        self.pause(mode, clear_cache=level > 0)
        self.engine.sleep(level)

    def wake_up(self, tags: Sequence[SleepTag] | None = None) -> bool:
        """Brings back what `tags` name of `weights` and `kv_cache`, or both (None), and returns whether nothing sleeps.

        Then it computes again. Nothing is compiled. After `sleep(level=2)`, weights come with `update_weights` alone.
        """
        is_awake = self.engine.wake_up(tags)
        if is_awake:
            self.engine.resume()
        return is_awake

    def is_sleeping(self) -> bool:
        """Returns whether the engine is paused, at any level of sleep, as in vLLM."""
        return self.engine.is_paused

    def release_kv(self) -> None:
        """Frees the memory of KV pages while the engine is paused, until `wake_up(["kv_cache"])`.

        Requests that a pause has kept compute all their tokens again afterwards.
        """
        self.engine.release_kv()

    def close(self) -> None:
        """Frees the device's memory. `with LLM(...) as llm:` calls it."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check(
        self,
        prompts: Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        *,
        add_special_tokens: bool = True,
        final_only: bool = True,
        beam_search: BeamSearchParams | None = None,
        poolings: Sequence[Pooling] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[GenerationRequest]:
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        priorities = [0] * len(prompts) if priority is None else list(priority)
        adapters: list[LoRARequest | None]
        if lora_request is None or isinstance(lora_request, LoRARequest | str):  # the check below refuses a path
            adapters = [lora_request] * len(prompts)
        else:
            adapters = list(lora_request)
        for name, values in (("sampling_params", params), ("priority", priorities), ("lora_request", adapters)):
            if len(values) != len(prompts):
                raise ValueError(f"{len(values)} {name} for {len(prompts)} prompts: give one for each, or one for all")
        requests = []
        for index, (prompt, one, rank) in enumerate(zip(prompts, params, priorities, strict=True)):
            if not isinstance(one, SamplingParams):
                raise ValueError(f"sampling_params must be SamplingParams, not {type(one).__name__}")
            if final_only:
                one = replace(one, output_kind=RequestOutputKind.FINAL_ONLY)
            request_id = str(next(self._request_ids))
            try:
                request = self.engine.check(
                    request_id,
                    prompt,
                    one,
                    add_special_tokens=add_special_tokens,
                    priority=rank,
                    beam_search=beam_search,
                    pooling=None if poolings is None else poolings[index],
                    lora_request=adapters[index],
                )
                requests.append(request)
            except ValueError as error:
                if len(prompts) > 1:
                    error.args = (f"prompt {index}: {error}",)
                raise
        return requests

    def _require_idle(self) -> None:
        self._require_resumed()
        if self.engine.has_work and not self.engine.is_closed:
            raise RuntimeError("a stream of this LLM is still open: read it to its end or close it first")

    def _require_resumed(self) -> None:
        if self.engine.is_paused and not self.engine.is_closed:
            raise RuntimeError("the LLM is paused, and computes nothing: call resume() or wake_up() first")

    def _complete(self, requests: list[GenerationRequest], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm  # 5 ms, which `jaxvllm generate` does not need

        outputs: dict[str, RequestOutput] = {}
        tokens_in = tokens_out = 0
        with tqdm(total=len(requests), desc="Requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            for result in self._run(requests):
                outputs[result.request_id] = result
                tokens_in += len(result.prompt_token_ids)
                tokens_out += sum(len(completion.token_ids) for completion in result.outputs)
                bar.update()
                _show_rates(bar, tokens_in, tokens_out)
        return [outputs[request.request_id] for request in requests]

    def _run(self, requests: list[GenerationRequest]) -> Iterator[RequestOutput]:
        """Queues the requests and steps until all are finished. If it is interrupted, it leaves none in the engine."""
        self._require_idle()
        try:
            for request in requests:
                self.engine.submit(request)
            while self.engine.has_work or any(one.request_id in self.engine.outputs for one in requests):
                if not self.engine.has_work:
                    self._require_resumed()
                yield from self.engine.step()
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
            while self.engine.has_work and not self.engine.is_closed:
                self.engine.step()


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """Returns the prompts as a list. A text, a mapping or a flat list of ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [cast(PromptLike, prompts)]
    if len(prompts) and all(isinstance(item, Integral) for item in prompts):
        return [cast(PromptLike, prompts)]
    return cast(list[PromptLike], list(prompts))


def _embedding(output: RequestOutput) -> EmbeddingRequestOutput:
    assert output.pooled is not None, "a prompt was not pooled"
    vector = EmbeddingOutput(output.pooled.tolist())
    return EmbeddingRequestOutput(output.request_id, vector, output.prompt_token_ids, output.num_cached_tokens)


def _show_rates(bar: "tqdm[Any]", tokens_in: int, tokens_out: int) -> None:
    elapsed = bar.format_dict["elapsed"] or 1e-9
    rates = f"input {tokens_in / elapsed:.0f} tok/s, output {tokens_out / elapsed:.0f} tok/s"
    bar.set_postfix_str(rates, refresh=False)
