"""`RequestMoves`: how requests leave an engine in the middle, and go on in another one with the same tokens."""

from collections.abc import Callable, Sequence

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import Request
from jaxvllm.engine.engine_adapters import EngineAdapters
from jaxvllm.engine.engine_weights import EngineWeights
from jaxvllm.engine.exported_request import ExportedRequest, SamplingState
from jaxvllm.engine.input_processor import InputProcessor
from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.engine.page_cargo import load_cargo, unload_cargo
from jaxvllm.engine.replica import Replica
from jaxvllm.kv_transfer.page_format import PageFormat


class RequestMoves:
    """Takes requests out of schedulers with their pages, and makes requests of what another engine has taken out."""

    def __init__(
        self,
        config: EngineConfig,
        replicas: Sequence[Replica],
        inputs: InputProcessor,
        weights: EngineWeights,
        adapters: EngineAdapters,
        page_format: Callable[[], PageFormat],
    ):
        """Moves requests of these replicas. Their pages travel as `EngineParts.page_format` says."""
        self._config = config
        self._replicas = replicas
        self._inputs = inputs
        self._weights = weights
        self._adapters = adapters
        self._page_format = page_format

    def take_out(self, request_id: str, outputs: OutputProcessor) -> ExportedRequest:
        """Ends a request here. For arguments and errors see `Engine.export_request`."""
        form = self._form()
        # It may have to wait for the name, or fail: nothing has ended yet.
        model = self._weights.version.mark(form.fingerprint)
        if request_id not in outputs:
            raise ParameterError(f"request {request_id!r} is unknown or has ended: nothing is left of it", "request_id")
        request = outputs.request(request_id)
        open_ids = outputs.children(request_id)
        [replica] = [one for one in self._replicas if open_ids[0] in one.scheduler]
        ended = {name: replica.scheduler.finish(name) for name in open_ids}
        replica.publish()
        left: dict[int, Request] = {}
        for index, sequence in enumerate(request.sequences()):
            one = ended.get(sequence.request_id)
            if one is not None:
                left[index] = one
        cargo = load_cargo(replica, form, [*left.values()])
        states = {index: SamplingState.of(one) for index, one in left.items()}
        [adapter] = {one.adapter for one in left.values()}
        digest = None if adapter is None else adapter.digest
        return ExportedRequest(request, outputs.take_out(request_id), states, model, cargo, digest)

    def read(
        self, exported: ExportedRequest, check_free: Callable[[Sequence[str]], None]
    ) -> tuple[list[Request], tuple[str, ...]]:
        """Returns the requests of an exported one for the scheduler, with what its grammar warns of.

        `check_free` raises ValueError for ids that are in use. For other errors see `Engine.import_request`.
        """
        if exported.model != self._weights.version.mark(self._form().fingerprint):
            raise ValueError(
                "the request was exported by an engine with another model, dtype, page or version of the weights: use "
                "one like it"
            )
        request, inputs = exported.request, self._inputs
        inputs.rules.check(request)
        inputs.check_fits(request)
        grammar, sequences = inputs.grammar(request), request.sequences()
        check_free([request.request_id, *(sequence.request_id for sequence in sequences)])
        exported.check(len(sequences), inputs.rules.vocab_size, inputs.rules.limit(request))
        adapter = self._adapters.like(request, exported.adapter)
        bad_words, version = inputs.bad_words(request), self._weights.version.name
        queued = [
            inputs.queued(sequences[index], version, grammar, bad_words, adapter, state)
            for index, state in exported.sequences.items()
        ]
        return queued, () if grammar is None else grammar.warnings

    def unload(self, exported: ExportedRequest, requests: Sequence[Request], replica: Replica) -> None:
        """Puts the pages that came with `requests` into the prefix cache of a replica."""
        form = self._form()
        for one in requests:
            unload_cargo(replica, form, one, exported.pages)

    def _form(self) -> PageFormat:
        """Returns how pages travel with requests. Raises NotImplementedError for pages of weights without a name."""
        if self._config.enable_return_routed_experts:
            raise NotImplementedError("the experts of tokens do not move with a request: leave the option out")
        if not self._weights.version.is_shared:
            raise NotImplementedError(
                "requests of an engine whose weights were replaced cannot move to another one: update with a version, "
                "which says for both engines which weights they have"
            )
        return self._page_format()
