"""`Rounds`: steps of replicas in lockstep, which are planned, dispatched and read together."""

from collections import deque
from collections.abc import Sequence

from jaxvllm.engine.decode_pace import DecodePace, DecodeTime
from jaxvllm.engine.expert_balancer import ExpertBalancer
from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.replica import Replica
from jaxvllm.runtime.lockstep import Lockstep


class Rounds:
    """Steps the replicas of a `Lockstep`. A round has a step of each replica that has something to compute.

    A round is read when as many are under way as may be, or when there was nothing for another one. Its steps are one
    program, so reading the first of them waits for all.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        replicas: Sequence[Replica],
        pace: DecodePace,
        depth: int,
        balancers: Sequence[ExpertBalancer],
    ):
        """Begins without a round. All `replicas` have this `pace`, and at most `depth` rounds are under way.

        The `balancers` move experts between rounds.
        """
        self._lockstep = lockstep
        self._replicas = replicas
        self._pace = pace
        self._depth = depth
        self._balancers = balancers
        self._under_way: deque[list[Replica]] = deque()  # of each round, those that have a step in it
        self._has_ended = False  # whether there was nothing for another round

    def dispatch(self, outputs: OutputProcessor) -> None:
        """Starts the next round, if any replica has something to compute. Fewer than `depth` must be under way."""
        for balancer in self._balancers:
            balancer.between_steps(self._lockstep.num_steps)
        choice = self._pace.choose(self._replicas)
        planned = [replica.plan(outputs, choice) for replica in self._replicas]
        if len({one.plan.num_drafts for one in planned if one is not None}) > 1:  # some compute prompts, or wait
            planned = [None if one is None else one.without_drafts() for one in planned]
        steps = self._lockstep.dispatch([None if one is None else one.plan for one in planned])
        for replica, one, step in zip(self._replicas, planned, steps, strict=True):
            replica.started(one, step)
        stepping = [replica for replica, step in zip(self._replicas, steps, strict=True) if step is not None]
        bucket = next((step.bucket for step in steps if step is not None), None)
        self._has_ended = bucket is None
        if bucket is not None:
            self._under_way.append(stepping)
            for replica in self._replicas:
                if replica not in stepping:
                    replica.count_idle_step(bucket)

    def collect(self, outputs: OutputProcessor) -> list[RequestOutput]:
        """Waits for the oldest round, if it must be read now, and returns what its tokens mean to callers."""
        results: list[RequestOutput] = []
        if not self._under_way or not (self._has_ended or len(self._under_way) == self._depth):
            return results
        times: list[DecodeTime] = []
        for replica in self._under_way.popleft():
            of_replica, time = replica.read(outputs)
            results += of_replica
            if time is not None:
                times.append(time)
        if times:
            self._pace.measured(DecodeTime.joined(times))
        return results

    def drop(self) -> None:
        """Forgets what is under way."""
        self._under_way.clear()
