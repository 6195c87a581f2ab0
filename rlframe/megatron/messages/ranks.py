"""The calls of the driver to the actors of Megatron ranks: a Protocol for each kind. Imports no megatron."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rlframe.algorithms.base import Algorithm
from rlframe.megatron.config.parallel import Coordinates
from rlframe.megatron.messages.chunks import Pieces
from rlframe.megatron.messages.host_room import HostRoom
from rlframe.megatron.messages.microbatch import Share
from rlframe.megatron.messages.moved import Moved
from rlframe.megatron.messages.setup import RankSetup, TrainerSetup
from rlframe.megatron.messages.trained import Trained
from rlframe.types.results import Metric
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import SourceRank

T = TypeVar("T")


class ScoringRank(Protocol):
    """A rank of a model that runs forward passes: a teacher's, a reward model's or the policy's. Lists are by
    micro-batch, and empty unless this rank reports."""

    def lead(self) -> str:
        """Returns `host:port` of a torch.distributed rendezvous that this rank leads as rank 0."""
        ...

    def prove(self) -> None:
        """Compares the copies of trained weights that several ranks hold, and frozen weights with those that were
        loaded.

        Raises:
            WeightsDrifted: they differ; the message names the tensor and the ranks.
        """
        ...

    def teacher_logprobs(self, share: Share) -> list[Tensor]:
        """Returns [T] nats under the teacher, at the temperature of the setup."""
        ...

    def teacher_top(self, share: Share, k: int, temperature: float) -> list[Tensor]:
        """Returns the k most likely tokens in each token's place; see `forward.compute_top`."""
        ...

    def outputs(self, share: Share) -> list[Tensor]:
        """Returns [T, C] values or [R, H] states, whichever the model has."""
        ...


class ForwardOnlyRank(ScoringRank, Protocol):
    """A rank of a frozen model's own group."""

    def start(self, setup: RankSetup) -> Coordinates:
        """Builds the model and loads its weights."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteReport:
    """A rank's report of the file of the training state that it has written."""

    written: bytes
    """Positions of its pieces, pickled for the ranks. The driver passes them on, and would import seconds of torch to
    read them."""
    write_s: float
    """Seconds until the file was on the disk. Most of what is read back has been by then."""
    verify_s: float
    """Further seconds until the rest was read back. 0 if that was not requested."""


class TrainerRank(ScoringRank, Protocol):
    """A rank of a model in training. Every method is called on all ranks of the group at once."""

    def start(self, setup: TrainerSetup) -> Coordinates:
        """Builds the model and loads its weights."""
        ...

    def logprobs(self, share: Share, reference: bool, temperature: float | None) -> list[Tensor]:
        """Returns [T] nats. With `reference`, under the frozen weights.

        Args:
            temperature: divisor of the logits; None means that of the setup.
        """
        ...

    def entropies(self, share: Share) -> list[Tensor]:
        """Returns [T] nats at the temperature of the setup."""
        ...

    def evaluate(self, share: Share, algorithm: Algorithm) -> dict[str, Metric]:
        """Returns the metrics of the loss of one step, merged over this rank's micro-batches. Nothing is trained."""
        ...

    def fingerprint(self) -> str:
        """Returns 64 hex digits that change with the model's config.json and with any bit of this rank's weights."""
        ...

    def negate(self) -> None:
        """Changes the sign of every weight. A second call undoes it bit for bit."""
        ...

    def flip_last_bits(self) -> None:
        """Changes the last bit of every weight. A second call undoes it bit for bit."""
        ...

    def train(self, shares: list[Share], algorithm: Algorithm, first_step: int) -> Trained:
        """Takes one optimizer step per entry of `shares`.

        Args:
            first_step: number of optimizer steps the run has taken before.
        """
        ...

    def warm_up(self) -> None:
        """Runs a small pass, so that the first step need not wait for libraries and kernels. Nothing is trained."""
        ...

    def sleep(self) -> Moved:
        """Gives back the device's memory, except the parameters, until `wake`."""
        ...

    def wake(self) -> Moved:
        """Undoes `sleep`."""
        ...

    def stage(self, folder: str, copy: bool) -> None:
        """Plans the files of the training state; `write` and `complete` do the rest."""
        ...

    def host_room(self) -> HostRoom:
        """Returns what a copy of the state needs in host memory, and what this host has."""
        ...

    def reserve_copy(self) -> None:
        """Makes room for a copy of the state in host memory, so that no step waits for it. May run during training."""
        ...

    def write(self, read_back: float) -> WriteReport:
        """Writes this rank's file of the staged state, and reads part of it back. It may run during training if the
        state was copied."""
        ...

    def complete(self, written: Sequence[WriteReport]) -> None:
        """Ends a save, with the report of every rank."""
        ...

    def verify(self, folder: str) -> None:
        """Compares this rank's share of the files in `folder` with their checksums."""
        ...

    def load_weights(self, folder: str) -> None:
        """Loads the weights of the distributed checkpoint in `folder`, also as those of the reference."""
        ...

    def load(self, folder: str, num_optimizer_steps: int) -> None:
        """Resumes from the training state in `folder`, saved after `num_optimizer_steps`."""
        ...

    def export(self, names: list[str], dtype: torch.dtype) -> Pieces:
        """Returns this rank's pieces of the Hugging Face tensors `names`."""
        ...

    def adapter_tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor of a PEFT file that this rank holds part of."""
        ...

    def export_adapter(self, names: list[str], dtype: torch.dtype) -> Pieces:
        """Returns this rank's pieces of the tensors `names` of a PEFT file."""
        ...

    def weights(self, call: RankCall[SourceRank, T], channel: str) -> T:
        """Calls this rank's WeightSource for the weight sync named `channel`, and returns its answer."""
        ...
