"""Commands for engines, beside requests. Each is one class here, and reaches engines wherever they are.

A command travels in `wire.Ask` to one engine, or from a pool to all of its engines; its answer comes back in
`wire.CommandAnswer`. So a new command is a class here, and perhaps an endpoint that asks it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from jaxvllm.core.lora import LoRARequest
from jaxvllm.core.pause import PauseMode, SleepTag
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.weight_version import KVChange
from jaxvllm.engine.page_view import PoolView

if TYPE_CHECKING:
    from jaxvllm.engine.engine import Engine


class EngineCommand[Answer](msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Something that an engine does between two steps, and answers. Its class name comes first on the wire."""

    answers: ClassVar[type]  # `Answer`, as the wire decodes it
    # Whether prefixes are forgotten, so that a pool no longer knows which engine has which.
    forgets_prefixes: ClassVar[bool] = False
    lasts: ClassVar[bool] = False  # whether an engine that is started again is told the latest of its kind
    takes_long: ClassVar[bool] = False  # so that an engine that is silent meanwhile is not taken for stuck

    @abstractmethod
    def run(self, engine: "Engine") -> Answer:
        """Does it. A ValueError or a NotImplementedError is told to the caller, and the engine goes on."""

    def ends(self, request: GenerationRequest) -> bool:
        """Returns whether it ends this request, which waits outside the engine until its grammar is compiled."""
        return False

    @abstractmethod
    def joined(self, answers: Sequence[Answer]) -> Answer:
        """Returns one answer in place of those of several engines, in their order."""


class YesNoCommand(EngineCommand[bool], frozen=True):
    """A command that is answered with True or False. Several engines have answered True where all of them have."""

    answers: ClassVar[type] = bool

    def joined(self, answers: Sequence[bool]) -> bool:
        return all(answers)


class ShowPages(EngineCommand[list[PoolView]], frozen=True):
    """Asks for the page pool of each replica."""

    answers: ClassVar[type] = list[PoolView]

    def run(self, engine: "Engine") -> list[PoolView]:
        return [PoolView.take(replica.scheduler) for replica in engine.replicas]

    def joined(self, answers: Sequence[list[PoolView]]) -> list[PoolView]:
        return [*chain.from_iterable(answers)]


class ShowExpertLoads(EngineCommand[dict[int, list[int]]], frozen=True):
    """Asks how many tokens have chosen each expert, by the number of the layer: see `Engine.expert_loads`."""

    answers: ClassVar[type] = dict[int, list[int]]

    def run(self, engine: "Engine") -> dict[int, list[int]]:
        return {layer: loads.tolist() for layer, loads in engine.expert_loads().items()}

    def joined(self, answers: Sequence[dict[int, list[int]]]) -> dict[int, list[int]]:
        first = answers[0]  # engines have one model
        return {layer: [*map(sum, zip(*(one[layer] for one in answers), strict=True))] for layer in first}


class ResetPrefixCache(YesNoCommand, frozen=True):
    """Makes replicas forget every cached prefix: see `Engine.reset_prefix_cache`."""

    reset_running_requests: bool = False
    reset_connector: bool = False

    forgets_prefixes: ClassVar[bool] = True

    def run(self, engine: "Engine") -> bool:
        return engine.reset_prefix_cache(self.reset_running_requests, self.reset_connector)


class UpdateWeights(EngineCommand[str], frozen=True):
    """Replaces the weights by those of a directory on the engine's host: see `Engine.update_weights`.

    Each engine replaces all of them or none. Where several do, some may succeed and others not, and the error says so.
    The answer is the name of the version.
    """

    directory: str
    version: str | None = None
    kv: KVChange = "drop"

    answers: ClassVar[type] = str
    forgets_prefixes: ClassVar[bool] = True
    lasts: ClassVar[bool] = True
    takes_long: ClassVar[bool] = True

    def run(self, engine: "Engine") -> str:
        return engine.update_weights(Path(self.directory), self.version, self.kv)

    def joined(self, answers: Sequence[str]) -> str:
        return answers[0]


class NameWeights(YesNoCommand, frozen=True):
    """Gives the weights another name: see `Engine.name_weights`."""

    version: str

    lasts: ClassVar[bool] = True

    def run(self, engine: "Engine") -> bool:
        engine.name_weights(self.version)
        return True


class ShowWeightVersions(EngineCommand[list[str]], frozen=True):
    """Asks each engine for the name of its weights."""

    answers: ClassVar[type] = list[str]

    def run(self, engine: "Engine") -> list[str]:
        return [engine.weight_version.name]

    def joined(self, answers: Sequence[list[str]]) -> list[str]:
        return [*chain.from_iterable(answers)]


class EngineRest(msgspec.Struct, frozen=True):
    """Whether an engine is paused, and what it has given back meanwhile."""

    is_paused: bool
    is_settled: bool  # whether it is paused, and everything about steps so far has been told
    sleeping: tuple[SleepTag, ...]


class ShowRest(EngineCommand[EngineRest], frozen=True):
    """Asks whether engines are paused, and what of them sleeps."""

    answers: ClassVar[type] = EngineRest

    def run(self, engine: "Engine") -> EngineRest:
        return EngineRest(engine.is_paused, engine.is_settled, engine.sleeping)

    def joined(self, answers: Sequence[EngineRest]) -> EngineRest:
        is_paused, is_settled = (all(getattr(one, name) for one in answers) for name in ("is_paused", "is_settled"))
        return EngineRest(is_paused, is_settled, tuple(dict.fromkeys(chain.from_iterable(a.sleeping for a in answers))))


class SetPause(YesNoCommand, frozen=True):
    """Pauses engines, or with None lets them compute again: see `Engine.pause` and `Engine.resume`."""

    mode: PauseMode | None

    lasts: ClassVar[bool] = True

    def run(self, engine: "Engine") -> bool:
        if self.mode is None:
            engine.resume()
        else:
            engine.pause(self.mode)
        return True

    def ends(self, request: GenerationRequest) -> bool:
        return self.mode == "abort"


class AbortRequests(EngineCommand[int], frozen=True):
    """Ends requests, by the ids of their answers, or all (None). Their callers get what they have, as after a pause.

    The answer is how many have ended, but for those whose grammars still compile.
    """

    answer_ids: frozenset[str] | None

    answers: ClassVar[type] = int

    def run(self, engine: "Engine") -> int:
        outputs = engine.outputs
        return engine.abort_all([name for name in outputs.request_ids if self.ends(outputs.request(name))])

    def ends(self, request: GenerationRequest) -> bool:
        return self.answer_ids is None or (request.answer_id or request.request_id) in self.answer_ids

    def joined(self, answers: Sequence[int]) -> int:
        return sum(answers)


class CheckSleep(YesNoCommand, frozen=True):
    """Asks engines whether they have a level of sleep, before they are paused for it: see `Engine.check_sleep`."""

    level: int

    def run(self, engine: "Engine") -> bool:
        engine.check_sleep(self.level)
        return True


class PutToSleep(YesNoCommand, frozen=True):
    """Makes engines give back memory: see `Engine.sleep`. They are paused."""

    level: int

    forgets_prefixes: ClassVar[bool] = True
    takes_long: ClassVar[bool] = True

    def run(self, engine: "Engine") -> bool:
        engine.sleep(self.level)
        return True


class ReleaseKV(YesNoCommand, frozen=True):
    """Makes engines free the memory of KV pages: see `Engine.release_kv`. They are paused."""

    forgets_prefixes: ClassVar[bool] = True

    def run(self, engine: "Engine") -> bool:
        engine.release_kv()
        return True


class WakeUp(YesNoCommand, frozen=True):
    """Brings back what sleeps, and answers whether nothing sleeps any more: see `Engine.wake_up`."""

    tags: tuple[SleepTag, ...] | None = None

    takes_long: ClassVar[bool] = True

    def run(self, engine: "Engine") -> bool:
        return engine.wake_up(self.tags)


class LoadAdapter(YesNoCommand, frozen=True):
    """Reads an adapter into host memory, so that what is wrong with it is told before requests name it."""

    name: str
    number: int
    path: str

    takes_long: ClassVar[bool] = True

    def run(self, engine: "Engine") -> bool:
        engine.adapters.load(LoRARequest(self.name, self.number, self.path))
        return True


class UnloadAdapter(YesNoCommand, frozen=True):
    """Forgets an adapter, but for requests that have it. No later one has its number."""

    number: int

    def run(self, engine: "Engine") -> bool:
        engine.adapters.unload(self.number)
        return True


type AnyCommand = (
    ShowPages
    | ShowExpertLoads
    | ShowWeightVersions
    | ResetPrefixCache
    | UpdateWeights
    | NameWeights
    | AbortRequests
    | ShowRest
    | SetPause
    | CheckSleep
    | PutToSleep
    | ReleaseKV
    | WakeUp
    | LoadAdapter
    | UnloadAdapter
)
