"""RankGroup: the common base on the driver of all groups of Megatron ranks. Imports no megatron."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, TypeVarTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.cluster.worker_group import WorkerGroup, shared
from rlframe.megatron.config.parallel import Coordinates, Parallel
from rlframe.megatron.messages.microbatch import Share, join, split
from rlframe.megatron.messages.ranks import ScoringRank
from rlframe.megatron.messages.setup import RankSetup
from rlframe.types.batch import Sequences, TopLogprobs

if TYPE_CHECKING:
    import ray

W = TypeVar("W", bound=ScoringRank)
S = TypeVar("S", bound=RankSetup)
Ts = TypeVarTuple("Ts")


class RankGroup(ABC, Generic[W]):
    """A group of Megatron ranks: sets up torch.distributed and distributes batches for forward passes."""

    role: ClassVar[str]
    """Name of the group in logs, errors and metrics."""
    workers: WorkerGroup[W]
    parallel: Parallel
    sequence_tokens: int
    """Token budget of one packed forward pass."""
    share_prompts: bool
    """Whether first tokens that sequences of a family have in common are computed once."""
    dp_rank: list[int]
    """Data-parallel index of each rank."""
    reporters: list[int]
    """The rank that has the results, by data-parallel index."""
    start_timeout_s: float
    """Limit of `start` in seconds."""
    _starting: "Sequence[ray.ObjectRef[Coordinates]]" = ()
    """Calls that `start` waits for."""

    @abstractmethod
    def begin(self) -> None:
        """Has every rank build the model and load its first weights, which `start` waits for. Other groups can do so at
        the same time. Does nothing if they have begun."""

    def start(self) -> None:
        """Waits until every rank has built the model and loaded its first weights."""
        self.begin()
        calls, self._starting = self._starting, ()
        coordinates = self.workers.wait(calls, doing=f"start of the {self.role}", timeout_s=self.start_timeout_s)
        self.dp_rank = [where.dp_rank for where in coordinates]
        reports = {where.dp_rank: where.rank for where in coordinates if where.reports}
        self.reporters = [reports[index] for index in range(self.parallel.dp)]

    def restart(self) -> None:
        """Restarts every rank in a new process on the same device, with the first weights."""
        self.workers.restart()
        self._starting = ()
        self.start()

    def prove(self) -> None:
        """Compares the copies of trained weights that several ranks hold, and frozen weights with those that were
        loaded.

        Raises:
            WeightsDrifted: they differ; the message names the tensor and the ranks.
        """
        self.workers.wait(self.workers.ask_all(ScoringRank.prove), doing="proof of the weights")

    def join_world(self, start: Callable[[W, S], Coordinates], setup: S) -> None:
        """Begins to start every rank with `setup`, its own rank and the address of the first."""
        if self._starting:
            return
        (address,) = self.workers.wait([self.workers.ask(0, ScoringRank.lead)], doing="rendezvous", ranks=[0])
        self._starting = [
            self.workers.ask(rank, start, replace(setup, rank=rank, init_method=f"tcp://{address}"))
            for rank in range(self.parallel.world)
        ]

    def _evaluate(
        self,
        method: Callable[[W, Share, *Ts], list[Tensor]],
        batch: Sequences,
        *arguments: *Ts,
        doing: str,
        rows: Tensor,
        replayed: bool = False,
    ) -> Tensor:
        """Returns [rows.sum(), ...] in the batch's order, from a method of the workers that takes a share.

        Args:
            rows: [R] number of rows of each sequence in the results.
            replayed: whether routers replay the batch's experts, if it has any. Otherwise these are not sent.
        """
        cut, plan = split(
            batch if replayed else replace(batch, routes=None),
            torch.zeros(batch.num_tokens),
            num_ranks=self.parallel.dp,
            max_tokens=self.sequence_tokens,
            share_prompts=self.share_prompts,
        )
        shares = [shared(share) for share in cut]
        calls = [
            self.workers.ask(rank, method, shares[self.dp_rank[rank]], *arguments)
            for rank in range(self.parallel.world)
        ]
        results = self.workers.wait(calls, doing=doing)
        return join([results[rank] for rank in self.reporters], plan, rows)


class TeacherRanks(RankGroup[W]):
    """Ranks that hold a teacher, alone or next to the policy."""

    def teacher_logprobs(self, batch: Sequences) -> Float[Tensor, " T"]:
        """Returns [T] nats of each token under the teacher, at the policy's temperature; 0.0 at first tokens."""
        return self._evaluate(ScoringRank.teacher_logprobs, batch, doing="teacher logprobs", rows=batch.lengths)

    def teacher_top(self, batch: Sequences, *, k: int, temperature: float) -> TopLogprobs:
        """Returns the teacher's most likely tokens in the place of each token."""
        found = self._evaluate(
            ScoringRank.teacher_top, batch, k, temperature, doing="teacher top k", rows=batch.lengths
        )
        return TopLogprobs(ids=found[:, :k].int(), logprobs=found[:, k:])
