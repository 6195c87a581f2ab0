"""TeacherGroup: the teacher in ranks of its own. Light: imports no megatron."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlframe.cluster.config import Device
from rlframe.cluster.placement import Slot
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.megatron import environment, platform
from rlframe.megatron.config import TrainConfig
from rlframe.megatron.layout import Coordinates, Parallel
from rlframe.megatron.microbatch import Microbatch
from rlframe.megatron.rank_group import TeacherRanks
from rlframe.megatron.teacher_config import forward_only
from rlframe.megatron.worker import MegatronRank
from rlframe.models.config import ModelConfig

if TYPE_CHECKING:
    from rlframe.megatron.teacher import Teacher


class TeacherWorker(MegatronRank):
    """The Ray actor of one rank: forwards typed calls to its Teacher."""

    teacher: "Teacher"

    def start(self, **setup: Any) -> Coordinates:
        """Build the model and load its weights. Arguments are those of TeacherSetup."""
        environment.prepare(setup["train"])
        device = platform.resolve(setup.pop("device"))
        platform.install(device)
        # Megatron reads torch.cuda while it is imported, so it must come after the platform is in place.
        from rlframe.megatron.teacher import Teacher, TeacherSetup  # noqa: PLC0415

        self.teacher = Teacher(TeacherSetup(device=device, **setup))
        return self.teacher.coordinates

    def teacher_logprobs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """See Teacher.logprobs."""
        return self.teacher.logprobs(microbatches)

    def teacher_top(self, microbatches: list[Microbatch], k: int, temperature: float) -> list[Tensor]:
        """See Teacher.top."""
        return self.teacher.top(microbatches, k=k, temperature=temperature)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherGroupSetup:
    """What the teacher's ranks need to start, besides their devices."""

    model: ModelConfig
    train: TrainConfig
    """The policy's: see `forward_only`."""
    layout: Parallel
    device: Device
    temperature: float


class TeacherGroup(TeacherRanks):
    """Forward passes of a frozen model on devices of its own."""

    role = "teacher"

    def __init__(
        self,
        setup: TeacherGroupSetup,
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
            TeacherWorker,
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
        )
