"""Does at random what an engine can do while weights change, and knows which of them every token should come from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm import LLM, RequestOutput
from jaxvllm.core.request import Request
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.core.step_plan import StepPlan
from jaxvllm.core.weight_version import KVChange
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.engine.replica import Replica
from jaxvllm.models import checkpoint
from jaxvllm.models.decoder import forward, project_logits
from jaxvllm.models.families import model_spec
from tests.engine.tiny import GREEDY, MAX_MODEL_LEN
from tests.models.dense import dense_attend

HEAD = "lm_head"
LONGEST_PROMPT = 60


def weights_of(version: str) -> str:
    """Returns which weights a version has: its name is theirs with a number, because they may come back."""
    return version.partition(" ")[0]


class LiveDriver:
    """Sends `num_streams` requests, and does all else at random meanwhile. No clock decides anything.

    `trees` are weights by name. Those of `turned` are those of `first` with another LM head.
    """

    def __init__(self, llm: LLM, trees: Mapping[str, Any], num_streams: int, seed: int):
        self.llm, self.engine, self.trees, self.num_streams = llm, llm.engine, trees, num_streams
        self.random = np.random.default_rng(seed)
        self.prompts: dict[str, list[int]] = {}
        self.ended: dict[str, CompletionOutput] = {}
        self.written = WrittenPositions()
        self.done: dict[str, int] = {}  # how often each thing was done
        self._has_weights = True
        self._numbers = count()

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Runs until all requests have ended, and then until the engine is awake and idle."""
        self._update("drop", "first")
        for replica in self.engine.replicas:
            self.written.watch(replica, monkeypatch)
        while len(self.ended) < self.num_streams:
            possible = self._possible()
            weights = np.array([weight for weight, _ in possible.values()], np.float64)
            name = str(self.random.choice([*possible], p=weights / weights.sum()))
            self.done[name] = self.done.get(name, 0) + 1
            self._take(possible[name][1]())
            for replica in self.engine.replicas:
                replica.scheduler.check_invariants()
        self._update("drop", "first")
        self.llm.wake_up()
        while self.engine.has_work:  # steps of requests that have ended
            self._take(self.engine.step())

    def _possible(self) -> dict[str, tuple[float, Callable[[], Any]]]:
        """Returns what can be done now, with how often it is."""
        engine, asleep = self.engine, self.engine.sleeping
        found: dict[str, tuple[float, Callable[[], Any]]] = {
            "update drop": (1.5, partial(self._update, "drop")),
            "update keep": (3, partial(self._update, "keep")),
        }
        if len(self.prompts) < self.num_streams:
            found["submit"] = (25, self._submit)
        if engine.has_work:
            found["step"] = (60, engine.step)
        if len(self.ended) < len(self.prompts):
            found["abort"] = (0.7, self._abort)
        if weights_of(self.written.now) != "other" and "weights" not in asleep:
            found["update head"] = (2, self._update_head)
        for mode, weight in (("abort", 0.3), ("keep", 1.5)) if asleep else (("abort", 0.3), ("keep", 1.5), ("wait", 1)):
            found[f"pause {mode}"] = (weight, partial(engine.pause, mode))
        if engine.is_paused and not asleep:
            found["resume"] = (8, engine.resume)
        if engine.is_settled:
            found |= {f"sleep {level}": (2.5, partial(self._sleep, level)) for level in (1, 2)}
            found["release pages"] = (2, self._release_pages)
        if asleep:
            found["wake pages"] = (5, partial(engine.wake_up, ["kv_cache"]))
        if asleep and self._has_weights:
            found["wake up"] = (8, self.llm.wake_up)
        return found

    def _submit(self) -> None:
        name = str(len(self.prompts))
        prompt = self.random.integers(2, 131, self.random.integers(1, LONGEST_PROMPT)).tolist()
        if self.prompts and self.random.random() < 0.6:  # with one that may run still: prefixes are shared
            earlier = self.prompts[str(self.random.integers(max(len(self.prompts) - 6, 0), len(self.prompts)))]
            prompt = [*earlier[: self.random.integers(len(earlier) // 2, len(earlier) + 1)], *prompt][:LONGEST_PROMPT]
        kind = (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)[int(self.random.integers(2))]
        params = replace(GREEDY, max_tokens=int(self.random.integers(1, 25)), output_kind=kind)
        self.engine.submit(self.engine.check(name, prompt, params))
        self.prompts[name] = prompt

    def _abort(self) -> list[RequestOutput]:
        last = self.engine.abort(str(self.random.choice(sorted(self.prompts.keys() - self.ended.keys()))))
        assert last is not None
        return [last]

    def _update(self, kv: KVChange, weights: str | None = None) -> None:
        chosen = weights or str(self.random.choice([*self.trees]))
        self._now(self.llm.update_weights(self.trees[chosen], f"{chosen} {next(self._numbers)}", kv), kv)
        self._has_weights = True

    def _update_head(self) -> None:
        turned = {"first": "turned", "turned": "first"}[weights_of(self.written.now)]
        kv: KVChange = ("drop", "keep")[int(self.random.integers(2))]
        head = {HEAD: self.trees[turned][HEAD]}
        self._now(self.llm.update_weights(head, f"{turned} {next(self._numbers)}", kv, partial=True), kv)

    def _now(self, version: str, kv: KVChange) -> None:
        assert self.llm.weight_version == version
        self.written.now = version
        if kv == "drop":
            self.written.drop()

    def _release_pages(self) -> None:
        self.engine.release_kv()
        self.written.drop()

    def _sleep(self, level: int) -> None:
        self.engine.sleep(level)
        self.written.drop()
        self._has_weights = self._has_weights and level == 1

    def _take(self, outputs: object) -> None:
        for output in outputs if isinstance(outputs, list) else ():
            if output.finished:
                assert output.request_id not in self.ended, "a request ended twice"
                self.ended[output.request_id] = output.outputs[0]


class WrittenPositions:
    """Which version of the weights has computed each position of a request, as replicas have dispatched it.

    A request that begins again has a new computation. Its first positions may be those of cached pages, and these must
    be of the weights that the engine has then.
    """

    def __init__(self) -> None:
        self.now = ""  # the version that the engine has
        self._computations: dict[str, list[list[str]]] = {}  # of each request, each a version for each position
        self._sampled: dict[str, dict[int, int]] = {}  # by request and position, the last computation that sampled it
        self._dropped: set[str] = set()  # requests without keys and values

    def watch(self, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
        dispatch = replica.runner.dispatch

        def noted(plan: StepPlan) -> Any:
            self._note(dict(replica.scheduler.running()), plan)
            return dispatch(plan)

        monkeypatch.setattr(replica.runner, "dispatch", noted)

    def drop(self) -> None:
        """Takes note that all requests have lost their keys and values."""
        self._dropped |= self._computations.keys()

    def _note(self, running: Mapping[int, Request], plan: StepPlan) -> None:
        for admission in plan.admissions:
            computations = self._computations.setdefault(admission.request.request_id, [])
            computations.append([self.now] * admission.num_cached)
            self._dropped.discard(admission.request.request_id)
        for slot, start, length, max_new in zip(plan.slots, plan.starts, plan.lengths, plan.max_new, strict=True):
            name = running[int(slot)].request_id
            computations = self._computations[name]
            assert name not in self._dropped, "it goes on from keys and values that are gone"
            assert len(computations[-1]) == start, "each position is computed once, and in its turn"
            computations[-1] += [self.now] * int(length)
            assert max_new <= 1, "a step computes one token of a row"
            if max_new:
                self._sampled.setdefault(name, {})[int(start + length)] = len(computations) - 1

    def replay(self, request_id: str, tokens: Sequence[int], oracle: "MixedWeights") -> dict[int, tuple[str, int]]:
        """Returns the version that has sampled each position, and the token that it should have sampled there."""
        found: dict[int, tuple[str, int]] = {}
        sampled = self._sampled.get(request_id, {})
        for number in sorted(set(sampled.values())):
            versions = self._computations[request_id][number]
            best = oracle.best(tokens, [weights_of(version) for version in versions])
            of_this = (place for place, computation in sampled.items() if computation == number)
            found |= {place: (versions[place - 1], int(best[place - 1])) for place in of_this}
        return found

    def is_mixed(self, request_id: str) -> bool:
        """Whether a token was sampled from keys and values of several weights."""
        used = set(self._sampled.get(request_id, {}).values())
        return any(len({weights_of(one) for one in self._computations[request_id][number]}) > 1 for number in used)


class MixedWeights:
    """The model with several weights, of which each position has its own: dense, without pages and without batches.

    All weights compute all positions side by side. Each layer of theirs attends to keys and values that are, at each
    position, those of the weights that have computed it.
    """

    def __init__(self, directory: Path, weights: Mapping[str, Mapping[str, np.ndarray]]):
        """`directory` has the config, and room for the tensors of `weights` by name."""
        config = checkpoint.read_config(directory)
        spec = model_spec(config, MAX_MODEL_LEN)
        self._numbers = {name: number for number, name in enumerate(weights)}
        loaded = []
        for tensors in weights.values():
            save_file(dict(tensors), directory / "model.safetensors")
            options: Any = dict(dtype=jnp.float32, layout="separate", hf_config=config)
            loaded.append(checkpoint.load(directory, spec, **options))
        self._params = jax.tree.map(lambda *arrays: jnp.stack(arrays), *loaded)

        def attend(own: jax.Array, given: Any, q: Any, k: jax.Array, v: jax.Array, **options: Any) -> Any:
            def of_position(x: jax.Array) -> jax.Array:
                return jnp.take_along_axis(jax.lax.all_gather(x, "weights"), own[None, :, None, None], axis=0)[0]

            attended, _ = dense_attend((), given, q, of_position(k), of_position(v), **options)
            return attended, own

        def best(params: Any, tokens: jax.Array, own: jax.Array) -> jax.Array:
            def logits(params: Any) -> jax.Array:
                positions = jnp.arange(MAX_MODEL_LEN, dtype=jnp.int32)
                hidden, _ = forward(params, spec, tokens, positions, own, attend)
                return project_logits(params, spec, hidden)

            every = jax.vmap(logits, axis_name="weights")(params)
            return jnp.take_along_axis(every, own[None, :, None], axis=0)[0].argmax(-1)

        self._best = jax.jit(best)

    def best(self, tokens: Sequence[int], own: Sequence[str]) -> np.ndarray:
        """Returns the best token after each position, where position p is computed by the weights `own[p]`."""
        padded, numbers = np.zeros((2, MAX_MODEL_LEN), np.int32)
        padded[: len(tokens)] = tokens
        numbers[: len(own)] = [self._numbers[name] for name in own]
        return np.asarray(self._best(self._params, padded, numbers))
