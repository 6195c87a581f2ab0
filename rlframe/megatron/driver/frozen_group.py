"""Frozen models in ranks of their own: a teacher, a reward model. Light: imports no megatron."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from rlframe.cluster.config import Device
from rlframe.cluster.placement import Slot
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.megatron.config.frozen import forward_only
from rlframe.megatron.config.parallel import Coordinates, Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.cpu import platform
from rlframe.megatron.driver.rank_group import RankGroup, TeacherRanks
from rlframe.megatron.messages.microbatch import Microbatch
from rlframe.megatron.worker import environment
from rlframe.megatron.worker.worker import MegatronRank
from rlframe.models.config import ModelConfig
from rlframe.ops.sequences import last_outputs
from rlframe.types.batch import Sequences

if TYPE_CHECKING:
    from rlframe.megatron.worker.frozen import Frozen


class FrozenWorker(MegatronRank):
    """The Ray actor of one rank: forwards typed calls to its Frozen."""

    frozen: "Frozen"

    def start(self, **setup: Any) -> Coordinates:
        """Build the model and load its weights. Arguments are those of FrozenSetup."""
        environment.prepare(setup["train"])
        device = platform.resolve(setup.pop("device"))
        platform.install(device)
        # Megatron reads torch.cuda while it is imported, so it must come after the platform is in place.
        from rlframe.megatron.worker.frozen import Frozen, FrozenSetup  # noqa: PLC0415

        self.frozen = Frozen(FrozenSetup(device=device, **setup))
        return self.frozen.coordinates

    def prove(self) -> None:
        """See Frozen.prove."""
        self.frozen.prove()

    def teacher_logprobs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """See Frozen.logprobs."""
        return self.frozen.logprobs(microbatches)

    def teacher_top(self, microbatches: list[Microbatch], k: int, temperature: float) -> list[Tensor]:
        """See Frozen.top."""
        return self.frozen.top(microbatches, k=k, temperature=temperature)

    def outputs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """See Frozen.outputs."""
        return self.frozen.outputs(microbatches)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenGroupSetup:
    """What a frozen model's ranks need to start, besides their devices."""

    model: ModelConfig
    train: TrainConfig
    """The policy's: see `forward_only`."""
    layout: Parallel
    device: Device
    temperature: float = 1.0
    """Logits are divided by it; a head of C outputs has none."""


class FrozenGroup(RankGroup):
    """Forward passes of a frozen model on ranks of its own."""

    num_outputs: ClassVar[int | None] = None
    """Of the model's head; None is a language model."""

    def __init__(
        self,
        setup: FrozenGroupSetup,
        *,
        slots: list[Slot],
        log_folder: str,
        num_threads: int,
        start_timeout_s: float,
        call_timeout_s: float,
    ):
        self.setup = setup
        self.parallel = setup.layout
        self.train = forward_only(setup.train, setup.layout)
        self.sequence_tokens = self.train.sequence_tokens
        self.start_timeout_s, self.call_timeout_s = start_timeout_s, call_timeout_s
        self.workers = WorkerGroup(
            FrozenWorker,
            role=self.role,
            slots=slots,
            log_folder=log_folder,
            num_threads=num_threads,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
        )

    def start(self) -> None:
        """Build the model on every rank and load its weights."""
        self.join_world(
            start_timeout_s=self.start_timeout_s,
            device=self.setup.device,
            model=self.setup.model,
            train=self.train,
            temperature=self.setup.temperature,
            timeout_s=self.call_timeout_s,
            num_outputs=self.num_outputs,
        )


class TeacherGroup(FrozenGroup, TeacherRanks):
    """The model to learn from."""

    role = "teacher"


class RewardModelGroup(FrozenGroup):
    """A model with one output, which scores whole responses."""

    role = "reward_model"
    num_outputs = 1

    def scores(self, batch: Sequences) -> Float[Tensor, " R"]:
        """[R] what the head says at each sequence's last token in the loss, as `reward_model` learns it."""
        values = self._evaluate("outputs", batch, doing="scores of the reward model", rows=batch.lengths)  # [T, 1]
        return last_outputs(values, batch)[:, 0]
