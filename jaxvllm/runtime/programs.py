"""Compiled programs, one for each bucket. A small plain one is compiled first, the others while the engine serves.

The smallest answers soonest: on a slow device, a prompt of 5 tokens takes much longer in a step for 512 than in one for
16. Where most requests have no logit rules, its plain twin comes before it, and steps with others wait for the first.
Then comes the largest.
Until it is ready, the scheduler plans no more than the first holds. Nothing is compiled beside the first step of a
request that comes at once.

Split buckets are compiled when the first plan could use one, and drafted ones, where nobody chose a proposer, when
something asks for them: most engines need neither.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from jaxvllm.core.step_plan import StepPlan, StepRoom
from jaxvllm.runtime.buckets import Bucket, BucketLadder

logger = logging.getLogger(__name__)

COMPILE_NICENESS = 15
# The interval of checking whether a program is ready: a tenth of a slow step.
WAIT_SECONDS = 0.01
# How long the other buckets wait for the first step to end. Beside their tracing and LLVM its token came 0.32 s after
# the engine was ready, and 0.08 in a warm start (embedded model, two quiet cores).
FIRST_STEP_SECONDS = 0.25


class Programs[Program]:
    """The compiled step of every bucket of a ladder. Until a bucket is ready, its plans run padded in a larger one.

    While there is no larger one either, they wait.
    """

    def __init__(
        self,
        ladder: BucketLadder,
        compile_step: Callable[[Bucket], Program],
        yields: bool = True,
        afterwards: Sequence[Callable[[], object]] = (),
    ):
        """Compiles the earliest bucket before it returns. The engine can serve with it.

        A thread compiles the others, the largest next, and does what is `afterwards`, which compiles something else
        that few requests need. With `yields` its priority is low from then on, so that it does not slow the steps down.
        """
        self._afterwards = afterwards
        self.ladder = ladder
        self._yields = yields
        self._compile_step = compile_step
        self._closed = threading.Event()
        self._needs_more = threading.Event()
        self._ready: dict[Bucket, Program] = {}
        # Tokens and rows of the compiled buckets that hold prompts. Every step asks, so they are not sought each time.
        self.mixed_sizes: tuple[tuple[int, int], ...] = ()
        self._compile(ladder.earliest)
        # The thread is no daemon, because XLA must not compile while the interpreter shuts down. Then the thread ends
        # after the bucket at hand.
        self._thread = threading.Thread(target=self._compile_rest, name="jaxvllm-compile")
        self._split_thread: threading.Thread | None = None
        self._draft_thread: threading.Thread | None = None
        self._thread.start()

    @property
    def num_compiled(self) -> int:
        return len(self._ready)

    @property
    def num_missing(self) -> int:
        """The buckets of the ladder that are not compiled yet."""
        return sum(bucket not in self._ready for bucket in self.ladder.buckets)

    @property
    def largest(self) -> Program | None:
        """The program of the largest bucket, which holds every plan, or None while it is not ready."""
        return self._ready.get(self.ladder.largest)

    @property
    def room(self) -> StepRoom | None:
        """The most that a plan should have, so that it need not wait; None: it may have all that the ladder holds."""
        first = self.ladder.first
        return None if self.ladder.largest in self._ready else StepRoom(first.num_tokens, first.num_rows)

    @property
    def burst_width(self) -> int:
        """The most decode steps that a plan with any number of decode rows may take in one call."""
        widest = self.ladder.widest
        return widest.width if widest in self._ready else 1

    def compile_more(self) -> None:
        """Has the other buckets compiled from now on: the first step is over, or something waits for them."""
        self._needs_more.set()

    @property
    def may_compile_drafts(self) -> bool:
        """Whether there are buckets with drafts that are compiled only when `compile_drafts` is called."""
        return self.ladder.drafts.on_demand and self._draft_thread is None and bool(self.ladder.drafted)

    def compile_drafts(self) -> None:
        """Begins to compile the buckets with drafts that wait for it, after all others."""
        if self.may_compile_drafts:
            self._draft_thread = self._compile_behind(self.ladder.drafted, "jaxvllm-compile-drafts")

    def drafted(self, num_rows: int) -> dict[int, Bucket]:
        """Returns the compiled buckets with drafts that so many decode rows get, by the drafts that a row may have."""
        ready = [b for b in self.ladder.drafted if b.num_rows >= num_rows and b in self._ready]
        return {b.num_drafts: b for b in reversed(ready)}  # the smallest of each

    def choose(self, plan: StepPlan, *others: StepPlan) -> Bucket:
        """Returns the cheapest compiled bucket that holds `plan`, and each of `others`. It waits until there is one.

        Raises RuntimeError when none compiles.
        """
        if any(one.is_split and self.ladder.choose(one, self.ladder.split) for one in (plan, *others)):
            self._compile_split()
        while True:
            compiling = self._thread.is_alive()
            ready = tuple(self._ready)  # a copy, because the compiling thread adds to the original
            if others:
                ready = tuple(bucket for bucket in ready if all(bucket.holds(one) for one in others))
            if (bucket := self.ladder.choose(plan, ready)) is not None:
                return bucket
            can_be_held = self.ladder.choose(plan, self.ladder.buckets) is not None
            assert can_be_held, f"no bucket holds {plan.num_tokens} tokens in {plan.num_rows} rows"
            if not compiling:
                raise RuntimeError(f"no bucket that holds {plan.num_tokens} tokens compiled: see the log above")
            self.compile_more()
            self._thread.join(WAIT_SECONDS)

    def wait_for(self, bucket: Bucket) -> Program:
        """Waits until `bucket` is compiled and returns its program. Another process may have it, and use it, earlier.

        Raises RuntimeError when it does not compile.
        """
        thread = self._thread
        if bucket.is_split:
            thread = self._compile_split()
        elif bucket.num_drafts:
            self.compile_drafts()
            thread = self._draft_thread or thread
        while True:
            compiling = thread.is_alive()
            if bucket in self._ready:
                return self._ready[bucket]
            if not compiling:
                raise RuntimeError(f"bucket {bucket} did not compile here, and process 0 uses it: see the log above")
            self.compile_more()
            thread.join(WAIT_SECONDS)

    def wait(self) -> None:
        """Waits until every bucket is compiled that was asked for. Split and drafted ones may be asked for later."""
        self.compile_more()
        self._thread.join()
        for thread in (self._split_thread, self._draft_thread):
            if thread is not None:
                thread.join()

    def close(self) -> None:
        """Stops compiling after the bucket at hand."""
        self._closed.set()
        self.wait()

    def _compile_split(self) -> threading.Thread:
        """Begins to compile the split buckets, unless that has begun."""
        if self._split_thread is None:
            self._split_thread = self._compile_behind(self.ladder.split, "jaxvllm-compile-split")
        return self._split_thread

    def _compile_behind(self, buckets: Sequence[Bucket], name: str) -> threading.Thread:
        """Starts a thread that compiles `buckets` after those that every engine needs."""

        def compile_them() -> None:
            self._thread.join()
            self._give_way()
            self._compile_all(buckets)

        thread = threading.Thread(target=compile_them, name=name)
        thread.start()
        return thread

    def _give_way(self) -> None:
        if self._yields and sys.platform == "linux":  # on other systems this would change the whole process
            # Steps have priority: on 2 cores they ran at 609 tokens per second instead of 496 while this compiled.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)

    def _compile_all(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if self._must_end:
                return
            if bucket not in self._ready:
                try:
                    self._compile(bucket)
                except Exception:  # a larger bucket serves its plans, only slower; without the largest, plans are small
                    if self._must_end:  # Python starts no threads any more, and the compiler needs some
                        return
                    logger.exception("bucket %s did not compile; others take its steps, only slower", bucket)

    def _compile_rest(self) -> None:
        self._needs_more.wait(FIRST_STEP_SECONDS)
        # Plans may wait for these, and beside busy processes a thread that has given way gets 0.5% of a core.
        self._compile_all([self.ladder.first, self.ladder.largest])
        self._give_way()
        drafted = () if self.ladder.drafts.on_demand else self.ladder.drafted
        self._compile_all((*self.ladder.compile_order(), *drafted, *self.ladder.blind))
        for compile_it in self._afterwards:
            if self._must_end:
                return
            try:
                compile_it()
            except Exception:  # who needs it meets the error
                if self._must_end:
                    return
                logger.exception("a program did not compile; requests that need it fail")

    @property
    def _must_end(self) -> bool:
        return self._closed.is_set() or not threading.main_thread().is_alive()

    def _compile(self, bucket: Bucket) -> None:
        start = time.monotonic()
        self._ready[bucket] = self._compile_step(bucket)
        is_new = (bucket.num_tokens, bucket.num_rows) not in self.mixed_sizes
        if is_new and not (bucket.is_decode or bucket.is_split or bucket.is_blind):
            self.mixed_sizes = (*self.mixed_sizes, (bucket.num_tokens, bucket.num_rows))
        logger.debug("compiled %s in %.2f s", bucket, time.monotonic() - start)
