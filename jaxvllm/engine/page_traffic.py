"""Page traffic: brings pages from a connector into a replica's pool, and the replica's full pages to the connector."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxvllm.core.page_loads import PageLoad, PageSave
from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.engine.page_moves import PageMoves
from jaxvllm.kv_transfer.connector import KVConnector, TransferParams
from jaxvllm.kv_transfer.page_format import Page
from jaxvllm.runtime.page_copies import COPY_BATCH, PageContents

logger = logging.getLogger(__name__)

# Copies of pages that wait for the thread that saves them, `COPY_BATCH` pages each. Beyond that pages are not saved.
MOST_COPIES = 64


class PageTraffic:
    """The pages of one replica on their way from and to a connector. Only the engine's loop calls it."""

    def __init__(self, connector: KVConnector, moves: PageMoves):
        self._connector = connector
        self._moves = moves
        self._loads: list[tuple[PageLoad, Future[Sequence[Page]]]] = []
        self._saving = ThreadPoolExecutor(1, "jaxvllm-save-pages")
        self._saves: list[Future[None]] = []
        self.num_failed_loads = 0
        self.num_saved_pages = 0

    @property
    def has_loads(self) -> bool:
        """Whether pages are on their way in."""
        return bool(self._loads)

    def bring(self, scheduler: Scheduler) -> None:
        """Begins the loads that the scheduler wants, and puts what has arrived into its pages. It does not wait."""
        for load in scheduler.take_loads():
            self._loads.append((load, self._connector.load(load.request, load.hashes)))
        waiting = []
        for load, future in self._loads:
            if future.done():
                self._put(scheduler, load, future)
            else:
                waiting.append((load, future))
        self._loads = waiting

    def _put(self, scheduler: Scheduler, load: PageLoad, future: Future[Sequence[Page]]) -> None:
        if not scheduler.is_wanted(load):
            return
        pages: Sequence[Page] = ()
        if (error := future.exception()) is None:
            pages = future.result()
        else:
            logger.warning("pages of request %s did not come and are computed: %s", load.request.request_id, error)
        self.num_failed_loads += len(pages) < len(load.hashes)
        count = self._moves.write(load.pages, pages)
        scheduler.loaded(load, count)

    def save(self, scheduler: Scheduler) -> None:
        """Copies the full pages that the connector lacks, after all steps that were dispatched. It does not wait."""
        self._saves = [future for future in self._saves if not future.done()]
        for save in scheduler.take_saves():
            at = [index for index, digest in enumerate(save.hashes) if self._connector.wants(save.request, digest)]
            if not at:
                continue
            if len(self._saves) * COPY_BATCH + len(at) > MOST_COPIES * COPY_BATCH:
                logger.warning("%d pages are not saved, because the connector is slower than the engine", len(at))
                continue
            pages = tuple(of_group[at] for of_group in save.pages)
            wanted = PageSave(save.request, tuple(save.hashes[i] for i in at), pages)
            taken = self._moves.copy(wanted.pages)
            self._saves.append(self._saving.submit(self._keep, wanted, taken))

    def _keep(self, save: PageSave, taken: list[PageContents]) -> None:
        """Gives the connector the pages that were copied. It waits for the device, in a thread of its own."""
        try:
            for digest, page in zip(save.hashes, self._moves.read(save.pages, taken), strict=True):
                self.num_saved_pages += self._connector.save(digest, page)
        except Exception:
            logger.exception("%d pages could not be saved", len(save.hashes))

    def finished(self, request: Request, page_size: int) -> TransferParams | None:
        """Tells the connector that `request` has ended, and returns what its caller is to be told."""
        hashes = request.hashes(page_size)[: request.num_prompt_tokens // page_size]
        return self._connector.finished(request, hashes)

    def drop(self) -> None:
        """Forgets the loads: the scheduler that wanted them is gone."""
        self._loads.clear()

    def forget(self, scheduler: Scheduler) -> None:
        """Ends loads without pages, and saves with what was taken: nothing old reaches cache or connector any more."""
        scheduler.take_saves()
        for load in (*scheduler.take_loads(), *(load for load, _ in self._loads)):
            scheduler.loaded(load, 0)
        self._loads.clear()
        self.wait_until_saved()

    def wait_until_saved(self) -> None:
        """Waits until the connector has every page that `save` took."""
        for future in self._saves:
            future.result()

    def close(self) -> None:
        """Saves what was taken, and ends the thread."""
        self._saving.shutdown()
