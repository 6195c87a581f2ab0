"""Frozen models in ranks of their own: a teacher, a reward model. Imports no megatron."""

from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from rlframe.cluster.placement import Allocation
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.megatron.config.parallel import Coordinates, Parallel
from rlframe.megatron.driver.rank_group import RankGroup, TeacherRanks
from rlframe.megatron.messages.microbatch import Share
from rlframe.megatron.messages.ranks import ForwardOnlyRank
from rlframe.megatron.messages.setup import RankSetup
from rlframe.megatron.worker.worker import MegatronRank, prepare
from rlframe.ops.sequences import last_outputs
from rlframe.types.batch import Sequences
from rlframe.utils.process import garbage

if TYPE_CHECKING:
    from rlframe.megatron.worker.forward_only import ForwardOnly


class ForwardOnlyWorker(MegatronRank, ForwardOnlyRank):
    """The Ray actor of one rank: forwards typed calls to its ForwardOnly."""

    frozen: "ForwardOnly"

    def start(self, setup: RankSetup) -> Coordinates:
        """See ForwardOnlyRank."""
        prepare(setup)
        from rlframe.megatron.worker.forward_only import ForwardOnly  # noqa: PLC0415

        self.frozen = ForwardOnly(setup)
        garbage.release()
        return self.frozen.coordinates

    def prove(self) -> None:
        """See ForwardOnly.prove."""
        self.frozen.prove()

    def teacher_logprobs(self, share: Share) -> list[Tensor]:
        """See ForwardOnly.logprobs."""
        return self.frozen.logprobs(share.microbatches())

    def teacher_top(self, share: Share, k: int, temperature: float) -> list[Tensor]:
        """See ForwardOnly.top."""
        return self.frozen.top(share.microbatches(), k=k, temperature=temperature)

    def outputs(self, share: Share) -> list[Tensor]:
        """See ForwardOnly.outputs."""
        return self.frozen.outputs(share.microbatches())


class ForwardOnlyGroup(RankGroup[ForwardOnlyRank]):
    """Forward passes of a frozen model on ranks of its own."""

    def __init__(
        self,
        setup: RankSetup,
        *,
        slots: list[Allocation],
        log_folder: str,
        num_threads: int,
        start_timeout_s: float,
        call_timeout_s: float,
    ):
        self.setup = setup
        self.parallel = Parallel.parse(setup.train.parallel)
        self.sequence_tokens = setup.train.sequence_tokens
        self.share_prompts = setup.train.share_prompts
        self.start_timeout_s = start_timeout_s
        self.workers = WorkerGroup(
            ForwardOnlyWorker,
            role=self.role,
            slots=slots,
            log_folder=log_folder,
            num_threads=num_threads,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
        )

    def begin(self) -> None:
        """See RankGroup.begin."""
        self.join_world(ForwardOnlyRank.start, self.setup)


class TeacherGroup(ForwardOnlyGroup, TeacherRanks[ForwardOnlyRank]):
    """The teacher's ranks."""

    role = "teacher"


class RewardModelGroup(ForwardOnlyGroup):
    """The ranks of a model with one output, which scores whole responses."""

    role = "reward_model"

    def scores(self, batch: Sequences) -> Float[Tensor, " R"]:
        """Returns [R] the head's output at each sequence's last token in the loss, as `reward_model` trains it."""
        values = self._evaluate(
            ForwardOnlyRank.outputs, batch, doing="scores of the reward model", rows=batch.lengths
        )  # [T, 1]
        return last_outputs(values, batch)[:, 0]
