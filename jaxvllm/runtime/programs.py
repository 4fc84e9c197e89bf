"""Compiled programs: one per bucket, compiled ahead of time, largest first, the rest while the engine serves."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxvllm.core.plan import StepPlan
from jaxvllm.runtime.buckets import Bucket, BucketLadder

logger = logging.getLogger(__name__)

COMPILE_NICENESS = 15
# How often to see whether a program is there: a tenth of a slow step.
WAIT_SECONDS = 0.01

type Compiled = Callable[..., Any]


class Programs:
    """The step of every bucket of a ladder. Until a bucket is compiled, its plans run padded in a larger one."""

    def __init__(self, ladder: BucketLadder, compile_step: Callable[[Bucket], Compiled], yields: bool = True):
        """Returns when the largest bucket is compiled: it holds every plan, so the engine can serve from then on.

        The others are compiled by a thread that `yields` to everything else on this machine, steps above all.
        """
        self.ladder = ladder
        self._yields = yields
        self._compile_step = compile_step
        self._closed = threading.Event()
        self._ready: dict[Bucket, Compiled] = {}
        self._compile(ladder.largest)
        # Not a daemon: XLA must not be compiling while the interpreter is torn down. It ends after one bucket then.
        self._thread = threading.Thread(target=self._compile_rest, name="jaxvllm-compile")
        self._thread.start()

    @property
    def num_compiled(self) -> int:
        return len(self._ready)

    @property
    def largest(self) -> Compiled:
        """The program that holds every plan. It is always there."""
        return self._ready[self.ladder.largest]

    def choose(self, plan: StepPlan) -> Bucket:
        """The cheapest bucket that is compiled and holds `plan`."""
        ready = tuple(self._ready)  # a snapshot: the compiling thread adds to it
        bucket = self.ladder.choose(plan, ready)
        assert bucket is not None, f"no bucket holds {plan.num_tokens} tokens in {plan.num_rows} rows"
        return bucket

    def wait_for(self, bucket: Bucket) -> Compiled:
        """The program of `bucket`, when it is compiled: another process may have chosen it, and had it earlier.

        RuntimeError when it does not compile.
        """
        while True:
            compiling = self._thread.is_alive()
            if bucket in self._ready:
                return self._ready[bucket]
            if not compiling:
                raise RuntimeError(f"bucket {bucket} did not compile here, and process 0 uses it: see the log above")
            self._thread.join(WAIT_SECONDS)

    def wait(self) -> None:
        """Blocks until every bucket is compiled: nothing compiles after."""
        self._thread.join()

    def close(self) -> None:
        """Stops compiling, after the bucket at hand."""
        self._closed.set()
        self._thread.join()

    def _compile_rest(self) -> None:
        if self._yields and sys.platform == "linux":  # elsewhere it would be the whole process
            # Steps go first: on 2 cores they ran at 609 tokens per second and not at 496 while this compiled.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
        for bucket in self.ladder.compile_order():
            if self._closed.is_set() or not threading.main_thread().is_alive():
                return
            if bucket not in self._ready:
                try:
                    self._compile(bucket)
                except Exception:  # the largest bucket serves its plans, only slower
                    logger.exception("bucket %s did not compile; its steps run padded in a larger one", bucket)

    def _compile(self, bucket: Bucket) -> None:
        start = time.monotonic()
        self._ready[bucket] = self._compile_step(bucket)
        logger.debug("compiled %s in %.2f s", bucket, time.monotonic() - start)
