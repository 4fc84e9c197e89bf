"""Page traffic: brings pages from a connector into a replica's pool, and the replica's full pages to the connector."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jaxvllm.core.page_loads import PageLoad, PageSave
from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.kv_transfer.connector import KVConnector, TransferParams
from jaxvllm.kv_transfer.page_format import Page, PageFormat
from jaxvllm.runtime.page_copies import COPY_BATCH, PageContents
from jaxvllm.runtime.runner import Runner

logger = logging.getLogger(__name__)

# Copies of pages that wait for the thread that saves them, `COPY_BATCH` pages each. Beyond that pages are not saved.
MOST_COPIES = 64


class PageTraffic:
    """The pages of one replica on their way from and to a connector. Only the engine's loop calls it."""

    def __init__(self, connector: KVConnector, page_format: PageFormat, runner: Runner):
        self._connector = connector
        self._format = page_format
        self._runner = runner
        self._loads: list[tuple[PageLoad, Future[Sequence[Page]]]] = []
        self._saving = ThreadPoolExecutor(1, "jaxvllm-save-pages")
        self._saves: list[Future[None]] = []
        self.num_loaded_pages = 0
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
        count = _num_whole(load, pages)
        if count:
            held = [self._format.held(page) for page in pages[:count]]
            contents = [np.stack(of_array) for of_array in zip(*held, strict=True)]
            self._runner.put_pages([of_group[:count] for of_group in load.pages], contents)
            self.num_loaded_pages += count
        scheduler.loaded(load, count)

    def save(self, scheduler: Scheduler) -> None:
        """Copies the full pages that the connector lacks, behind all steps that were dispatched. It does not wait."""
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
            taken = self._runner.take_pages(wanted.pages)
            self._saves.append(self._saving.submit(self._keep, wanted, taken))
            self.num_saved_pages += len(at)

    def _keep(self, save: PageSave, taken: list[PageContents]) -> None:
        """Gives the connector the pages that were copied. It waits for the device, in a thread of its own."""
        try:
            # Pages of a proposer, which are the last arrays, belong to the first group's.
            num_groups = len(save.pages)
            for batch, contents in enumerate(taken):
                arrays = [np.asarray(array) for array in contents]
                for place, digest in enumerate(save.hashes[batch * COPY_BATCH :][:COPY_BATCH]):
                    at = batch * COPY_BATCH + place
                    held = (save.pages[n if n < num_groups else 0][at] != TRASH_PAGE for n in range(len(arrays)))
                    some = tuple(array[place] if is_held else None for array, is_held in zip(arrays, held, strict=True))
                    self._connector.save(digest, self._format.page(some))
        except Exception:
            logger.exception("%d pages could not be saved", len(save.hashes))

    def finished(self, request: Request, page_size: int) -> TransferParams | None:
        """Tells the connector that `request` has ended, and returns what its caller is to be told."""
        hashes = request.hashes(page_size)[: request.num_prompt_tokens // page_size]
        return self._connector.finished(request, hashes)

    def drop(self) -> None:
        """Forgets the loads: the scheduler that wanted them is gone."""
        self._loads.clear()

    def wait_until_saved(self) -> None:
        """Waits until the connector has every page that `save` took."""
        for future in self._saves:
            future.result()

    def close(self) -> None:
        """Saves what was taken, and ends the thread."""
        self._saving.shutdown()


def _num_whole(load: PageLoad, pages: Sequence[Page]) -> int:
    """How many of the first `pages` have everything that the pool wants of them."""
    num_groups = len(load.pages)
    for index, page in enumerate(pages):
        for at, array in enumerate(page.arrays):
            group = load.pages[at if at < num_groups else 0]
            if array is None and group[index] != TRASH_PAGE:
                return index
    return len(pages)
