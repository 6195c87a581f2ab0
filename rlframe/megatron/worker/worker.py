"""MegatronWorker: the Ray actor of one training rank. `start` imports Megatron, nothing before it does."""

import pathlib
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import ray
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rlframe.algorithms.base import Algorithm
from rlframe.cluster.config import Device
from rlframe.cluster.worker import Worker
from rlframe.megatron.config.parallel import Coordinates
from rlframe.megatron.cpu import platform
from rlframe.megatron.messages.chunks import Pieces
from rlframe.megatron.messages.host_room import HostRoom
from rlframe.megatron.messages.microbatch import Share
from rlframe.megatron.messages.moved import Moved
from rlframe.megatron.messages.ranks import TrainerRank, WriteReport
from rlframe.megatron.messages.setup import RankSetup, TrainerSetup
from rlframe.megatron.messages.trained import Trained
from rlframe.megatron.worker import environment
from rlframe.types.results import Metric
from rlframe.utils.calls import RankCall
from rlframe.utils.process import garbage
from rlframe.utils.process.memory import used
from rlframe.utils.process.rendezvous import listen
from rlframe.weight_sync.border import SourceRank

if TYPE_CHECKING:
    from rlframe.megatron.worker.trainer import Trainer

T = TypeVar("T")
FILES = "files"
"""Ray's concurrency group of the calls that write files. They run in a thread of their own, during training."""
STORE_TIMEOUT = timedelta(seconds=60)
"""Timeout of a request to the store. The ranks' waits for each other there have their process group's timeout."""


def prepare(setup: RankSetup) -> None:
    """Prepares this process to run Megatron on the device of `setup`. Megatron reads torch.cuda when it is imported, so
    it comes first."""
    environment.prepare(setup.train)
    platform.install(platform.resolve(Device(setup.device.type)))


class MegatronRank(Worker):
    """A rank of a Megatron world."""

    rendezvous: TCPStore

    def lead(self) -> str:
        """Returns `host:port` of a torch.distributed rendezvous that this worker leads as rank 0."""
        host = self.info().address
        # Rank 0's rendezvous, in this process, finds the store at its port and shares it, as torch's own does.
        self.rendezvous = listen(host, timeout=STORE_TIMEOUT)
        return f"{host}:{self.rendezvous.port}"


class MegatronWorker(MegatronRank, TrainerRank):
    """Forwards typed calls to its Trainer."""

    trainer: "Trainer"

    def start(self, setup: TrainerSetup) -> Coordinates:
        """See TrainerRank."""
        prepare(setup)
        from rlframe.megatron.worker.trainer import Trainer  # noqa: PLC0415

        self.trainer = Trainer(setup)
        garbage.release()
        return self.trainer.coordinates

    def logprobs(self, share: Share, reference: bool, temperature: float | None) -> list[Tensor]:
        """See Trainer.logprobs."""
        return self.trainer.logprobs(share.microbatches(), reference=reference, temperature=temperature)

    def entropies(self, share: Share) -> list[Tensor]:
        """Returns the result of Trainer.entropies."""
        return self.trainer.entropies(share.microbatches())

    def teacher_logprobs(self, share: Share) -> list[Tensor]:
        """See Trainer.teacher_logprobs."""
        return self.trainer.teacher_logprobs(share.microbatches())

    def teacher_top(self, share: Share, k: int, temperature: float) -> list[Tensor]:
        """See Trainer.teacher_top."""
        return self.trainer.teacher_top(share.microbatches(), k=k, temperature=temperature)

    def outputs(self, share: Share) -> list[Tensor]:
        """See Trainer.outputs."""
        return self.trainer.outputs(share.microbatches())

    def evaluate(self, share: Share, algorithm: Algorithm) -> dict[str, Metric]:
        """See Trainer.evaluate."""
        return self.trainer.evaluate(share.microbatches(), algorithm)

    def prove(self) -> None:
        """See Trainer.prove."""
        self.trainer.prove()

    def fingerprint(self) -> str:
        """See Trainer.fingerprint."""
        return self.trainer.fingerprint()

    def negate(self) -> None:
        """See Trainer.negate."""
        self.trainer.negate()

    def flip_last_bits(self) -> None:
        """See Trainer.flip_last_bits."""
        self.trainer.flip_last_bits()

    def train(self, shares: list[Share], algorithm: Algorithm, first_step: int) -> Trained:
        """See Trainer.train."""
        begun = time.perf_counter()
        steps = self.trainer.train([share.microbatches() for share in shares], algorithm, first_step=first_step)
        return Trained(steps=steps, seconds=time.perf_counter() - begun, memory=used())

    def warm_up(self) -> None:
        """See Trainer.warm_up."""
        self.trainer.warm_up()

    def sleep(self) -> Moved:
        """See Trainer.sleep."""
        return self.trainer.sleep()

    def wake(self) -> Moved:
        """See Trainer.wake."""
        return self.trainer.wake()

    def stage(self, folder: str, copy: bool) -> None:
        """See Trainer.stage."""
        self.trainer.stage(pathlib.Path(folder), copy=copy)

    def host_room(self) -> HostRoom:
        """See Trainer.host_room."""
        return self.trainer.host_room()

    @ray.method(concurrency_group=FILES)
    def reserve_copy(self) -> None:
        """See Trainer.reserve_copy."""
        self.trainer.reserve_copy()

    @ray.method(concurrency_group=FILES)
    def write(self, read_back: float) -> WriteReport:
        """See Trainer.write."""
        done = self.trainer.write(read_back=read_back)
        return WriteReport(written=pickle.dumps(done), write_s=done.write_s, verify_s=done.verify_s)

    @ray.method(concurrency_group=FILES)
    def complete(self, written: Sequence[WriteReport]) -> None:
        """See Trainer.complete."""
        self.trainer.complete([pickle.loads(each.written) for each in written])

    def verify(self, folder: str) -> None:
        """See Trainer.verify."""
        self.trainer.verify(pathlib.Path(folder))

    def load_weights(self, folder: str) -> None:
        """See Trainer.load_weights."""
        self.trainer.load_weights(pathlib.Path(folder))

    def load(self, folder: str, num_optimizer_steps: int) -> None:
        """See Trainer.load."""
        self.trainer.load(pathlib.Path(folder), num_optimizer_steps=num_optimizer_steps)

    def export(self, names: list[str], dtype: torch.dtype) -> Pieces:
        """See Trainer.export."""
        return self.trainer.export(names, dtype)

    def adapter_tensors(self) -> dict[str, tuple[int, ...]]:
        """See Trainer.adapter_tensors."""
        return self.trainer.adapter_tensors()

    def export_adapter(self, names: list[str], dtype: torch.dtype) -> Pieces:
        """See Trainer.export_adapter."""
        return self.trainer.export_adapter(names, dtype)

    def weights(self, call: RankCall[SourceRank, T], channel: str) -> T:
        """See TrainerRank."""
        return call.on(self.trainer.source(channel))
