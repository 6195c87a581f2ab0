"""All training ranks of a model as one object on the driver, for the policy or the critic. Imports no megatron."""

import hashlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlframe.algorithms.base import Algorithm
from rlframe.cluster.placement import Allocation
from rlframe.cluster.worker_group import WorkerGroup, shared
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.driver.rank_group import TeacherRanks
from rlframe.megatron.messages.chunks import Pieces, chunks
from rlframe.megatron.messages.host_room import HostRoom
from rlframe.megatron.messages.microbatch import Share, join, optimizer_steps, split
from rlframe.megatron.messages.moved import Moved
from rlframe.megatron.messages.ranks import TrainerRank
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.megatron.worker.worker import FILES, MegatronWorker
from rlframe.ops.gae import explained_variance
from rlframe.types.batch import Batch, Sequences, TrainBatch
from rlframe.types.results import Metric, Sum, TrainResult, UpdateResult, merge
from rlframe.utils.calls import RankCall
from rlframe.utils.process.memory import of_role
from rlframe.weight_sync.border import SourceGroup, SourceRank

T = TypeVar("T")


class ModelGroup(TeacherRanks[TrainerRank], SourceGroup):
    """The ranks of one model: its outputs, its updates, its checkpoints, and the source of weight sync."""

    replays: ClassVar[bool] = False
    """Whether its routers replay the experts in a batch that the engine chose, if the batch has any."""

    def __init__(
        self,
        setup: TrainerSetup,
        algorithm: Algorithm,
        *,
        slots: list[Allocation],
        log_folder: str,
        num_threads: int,
        start_timeout_s: float,
        call_timeout_s: float,
    ):
        self.setup = setup
        self.algorithm = algorithm
        self.parallel = Parallel.parse(setup.train.parallel)
        self.sequence_tokens = setup.train.sequence_tokens
        self.share_prompts = setup.train.share_prompts
        self.num_optimizer_steps = 0
        """Number of optimizer steps taken so far in the run."""
        self.start_timeout_s = start_timeout_s
        self.metrics: dict[str, float] = {}
        """Metrics of the last training: memory of the rank that uses most, and seconds of the slowest. And of the last
        sleep and the last wake: bytes given back on all devices, seconds of the slowest rank, and what the worst rank
        could not give back."""
        self.spared: Int[np.ndarray, " N"] = np.zeros(0, dtype=np.int64)
        """First tokens of sequences that the last training did not compute in a pass over its batch, because those of
        others are the same (`train.share_prompts`): a number for each sequence that has some."""
        self.workers = WorkerGroup(
            MegatronWorker,
            role=self.role,
            slots=slots,
            log_folder=log_folder,
            num_threads=num_threads,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
            threads_of={FILES: 1},
        )

    def begin(self) -> None:
        """See RankGroup.begin. Separate from the constructor, so that the engines can start at the same time."""
        self.num_optimizer_steps, self.metrics = 0, {}
        self.join_world(TrainerRank.start, self.setup)

    @property
    def updates_per_batch(self) -> int:
        """Number of optimizer steps for which one rollout batch is used."""
        return self.setup.train.num_minibatches * self.setup.train.epochs_per_batch

    def logprobs(
        self, batch: Sequences, *, reference: bool = False, temperature: float | None = None
    ) -> Float[Tensor, " T"]:
        """Returns [T] nats of each token under the policy, or under the frozen reference; 0.0 at first tokens.

        Args:
            temperature: divisor of the logits; None means the temperature of sampling.
        """
        doing = "reference logprobs" if reference else "logprobs"
        replayed = self.replays and not reference
        return self._evaluate(
            TrainerRank.logprobs, batch, reference, temperature, doing=doing, rows=batch.lengths, replayed=replayed
        )

    def entropies(self, batch: Sequences) -> Float[Tensor, " T"]:
        """Returns [T] nats, the entropy of the distribution each token was drawn from, under the policy. 0.0 at first
        tokens."""
        return self._evaluate(
            TrainerRank.entropies, batch, doing="entropies", rows=batch.lengths, replayed=self.replays
        )

    def values(self, batch: Sequences) -> Float[Tensor, "T C"]:
        """Returns [T, C] the outputs of the model's head for each token, given the token and those before it.

        The model's algorithm must read `Output.VALUES`.
        """
        return self._evaluate(TrainerRank.outputs, batch, doing="values", rows=batch.lengths)

    def states(self, batch: Sequences) -> Float[Tensor, "R H"]:
        """Returns [R, H] the last hidden state of each sequence at its last token in the loss.

        The model's algorithm must read `Output.STATES`.
        """
        return self._evaluate(TrainerRank.outputs, batch, doing="states", rows=torch.ones_like(batch.lengths))

    def evaluate(self, batch: Sequences) -> dict[str, float]:
        """Returns the metrics of the loss of `batch` as one optimizer step, without a gradient."""
        shares = [shared(share) for share in self._split_step(batch)[0]]
        algorithm = shared(self.algorithm)
        calls = [
            self.workers.ask(rank, TrainerRank.evaluate, shares[share], algorithm)
            for rank, share in enumerate(self.dp_rank)
        ]
        results = self.workers.wait(calls, doing="evaluation")
        return average([merge(results[rank] for rank in self.reporters)])

    def fingerprint(self) -> str:
        """Returns 64 hex digits that change with the model's architecture, with any bit of its weights, and with the
        layout."""
        calls = self.workers.ask_all(TrainerRank.fingerprint)
        return hashlib.sha256("".join(self.workers.wait(calls, doing="digest of the weights")).encode()).hexdigest()

    def negate(self) -> None:
        """Changes the sign of every weight. A second call undoes it bit for bit. It tests what depends on the weights:
        training must not go on in between."""
        self.workers.wait(self.workers.ask_all(TrainerRank.negate), doing="change of signs")

    def flip_last_bits(self) -> None:
        """Changes the last bit of every weight, the smallest change that its number format has. A second call undoes it
        bit for bit. It measures how far rounding moves the outputs: training must not go on in between."""
        self.workers.wait(self.workers.ask_all(TrainerRank.flip_last_bits), doing="flip of last bits")

    def train(self, batch: Sequences) -> TrainResult:
        """Takes all optimizer steps of one batch: `epochs_per_batch` passes over `num_minibatches` equal parts of whole
        groups."""
        if self.algorithm.needs_entropies:
            batch = self.algorithm.with_entropies(batch, self.entropies(batch))
        train = self.setup.train
        parts = optimizer_steps(batch, num_minibatches=train.num_minibatches, epochs_per_batch=train.epochs_per_batch)
        minibatches = [batch.part(indices.start, indices.stop) for indices in parts]
        steps, plans = zip(*map(self._split_step, minibatches), strict=True)
        shares = [shared([step[index] for step in steps]) for index in range(self.parallel.dp)]
        algorithm = shared(self.algorithm)
        calls = [
            self.workers.ask(rank, TrainerRank.train, shares[share], algorithm, self.num_optimizer_steps)
            for rank, share in enumerate(self.dp_rank)
        ]
        results = self.workers.wait(calls, doing="train")
        self.num_optimizer_steps += len(steps)
        self.metrics |= of_role(self.role, [each.memory for each in results])
        self.metrics[f"time/{self.role}_update_s"] = max(each.seconds for each in results)
        self.spared = spared(steps[: train.num_minibatches])
        reported = [[results[rank].steps[index] for rank in self.reporters] for index in range(len(steps))]
        merged = [merge(update.metrics for update in updates) for updates in reported]
        # The first epoch has every sequence once.
        first = zip(minibatches[: train.num_minibatches], plans, reported, strict=False)
        return TrainResult(
            metrics=average(merged) | (shared_fraction(steps) if self.share_prompts else {}),
            num_optimizer_steps=len(steps),
            kept_logprobs=torch.cat([kept_logprobs(*each) for each in first]) if is_kept(batch) else None,
        )

    def warm_up(self) -> None:
        """Has every rank run a small pass, in which libraries choose their kernels and others are compiled, and does
        not wait for it. Nothing is trained. What fails here fails again, and is told, in the first step."""
        self.workers.ask_all(TrainerRank.warm_up)

    def sleep(self) -> None:
        """Gives back the devices' memory, except the parameters, until `wake`."""
        moved = self.workers.wait(self.workers.ask_all(TrainerRank.sleep), doing="sleep")
        self._note(moved, "sleep")
        self.metrics[f"memory/{self.role}_stuck_bytes"] = float(max(each.stuck_bytes for each in moved))

    def wake(self) -> None:
        """Undoes `sleep`."""
        self._note(self.workers.wait(self.workers.ask_all(TrainerRank.wake), doing="wake"), "wake")

    def _note(self, moved: list[Moved], what: str) -> None:
        given_back = sum(each.kept_bytes + each.dropped_bytes for each in moved)
        self.metrics[f"memory/{self.role}_offloaded_bytes"] = float(given_back)
        self.metrics[f"time/{self.role}_{what}_s"] = max(each.seconds for each in moved)

    def _split_step(self, minibatch: Sequences) -> tuple[list[Share], list[list[list[int]]]]:
        """Returns the result of `split`, weighted with the counts of the whole optimizer step."""
        weights = self.algorithm.token_weights(minibatch)
        return split(
            minibatch if self.replays else replace(minibatch, routes=None),
            weights,
            num_ranks=self.parallel.dp,
            max_tokens=self.sequence_tokens,
            share_prompts=self.share_prompts,
        )

    def host_room(self) -> list[tuple[str, HostRoom]]:
        """Returns what a copy of the training state needs in host memory, and what is there, with the node of each
        rank."""
        found = self.workers.wait(self.workers.ask_all(TrainerRank.host_room), doing="look at the hosts' memory")
        return [(info.node_id, room) for info, room in zip(self.workers.infos, found, strict=True)]

    def reserve_copy(self) -> None:
        """Has every rank make room for a copy of its training state in host memory, and does not wait for it. What
        fails here fails again, and is told, at the first checkpoint."""
        self.workers.ask_all(TrainerRank.reserve_copy)

    def save(self, folder: pathlib.Path, *, copy: bool, read_back: float) -> Callable[[], dict[str, float]]:
        """Prepares to write weights and optimizer into `folder`, which all nodes must share. The returned function
        writes them.

        Args:
            copy: whether to copy them first, so that the returned function may run in another thread during training.
            read_back: fraction of every file to read back and compare.

        Returns:
            A function that writes the files and returns the seconds it took, as metrics.
        """
        calls = self.workers.ask_all(TrainerRank.stage, str(folder), copy)
        self.workers.wait(calls, doing="checkpoint")
        return partial(self._write, read_back=read_back)

    def _write(self, *, read_back: float) -> dict[str, float]:
        calls = self.workers.ask_all(TrainerRank.write, read_back)
        written = self.workers.wait(calls, doing="writing of the checkpoint")
        calls = self.workers.ask_all(TrainerRank.complete, written)
        self.workers.wait(calls, doing="end of the checkpoint")
        return {
            "time/checkpoint_write_s": max(each.write_s for each in written),
            "time/checkpoint_verify_s": max(each.verify_s for each in written),
        }

    def verify(self, folder: pathlib.Path) -> None:
        """Compares the files in `folder` with their checksums. All ranks share the reading.

        Raises:
            CheckpointError: a file is missing, truncated or changed; the message names it and the tensor.
        """
        calls = self.workers.ask_all(TrainerRank.verify, str(folder))
        self.workers.wait(calls, doing="verification of the checkpoint")

    def load_weights(self, folder: pathlib.Path) -> None:
        """Loads the weights of the distributed checkpoint in `folder`, also as those of the reference."""
        calls = self.workers.ask_all(TrainerRank.load_weights, str(folder))
        self.workers.wait(calls, doing="loading of weights")

    def load(self, folder: pathlib.Path, *, num_optimizer_steps: int) -> None:
        """Resumes from the checkpoint in `folder`."""
        calls = self.workers.ask_all(TrainerRank.load, str(folder), num_optimizer_steps)
        self.workers.wait(calls, doing="resume")
        self.num_optimizer_steps = num_optimizer_steps

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields every Hugging Face tensor, whole, on the CPU, in checkpoint order. Only a few are in memory at a
        time."""
        info = self.call(SourceRank.describe)[0]
        yield from self._whole(TrainerRank.export, info.layout.tensors, dtype)

    def export_adapter(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor of a PEFT file of the adapters, as `export` does for the model."""
        calls = self.workers.ask_all(TrainerRank.adapter_tensors)
        held = self.workers.wait(calls, doing="export of the adapter")
        shapes = {name: shape for tensors in held for name, shape in tensors.items()}
        yield from self._whole(TrainerRank.export_adapter, shapes, dtype)

    def _whole(
        self,
        method: Callable[[TrainerRank, list[str], torch.dtype], Pieces],
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of `shapes` from the pieces that `method` returns on each rank."""
        for names in chunks(shapes, dtype):
            pieces = self.workers.wait(self.workers.ask_all(method, names, dtype), doing="export")
            for name in names:
                parts = [part for rank in pieces for part in rank[name]]
                # Not always `dtype`: see `model.export_dtype`.
                whole = torch.empty(shapes[name], dtype=parts[0][1].dtype)
                matrix = whole.view(-1, shapes[name][-1]) if len(shapes[name]) > 1 else whole[None]
                for (row, rows, col, cols), values in parts:
                    matrix[row : row + rows, col : col + cols] = values
                yield name, whole

    @property
    def num_ranks(self) -> int:
        """See SourceGroup."""
        return self.parallel.world

    def on_ranks(self, calls: Sequence[RankCall[SourceRank, T]]) -> list[T]:
        """See SourceGroup."""
        return self.on_channel("", calls)

    def on_channel(self, channel: str, calls: Sequence[RankCall[SourceRank, T]]) -> list[T]:
        """Makes a call on each rank's end of the weight sync of that name."""
        asked = [self.workers.ask(rank, TrainerRank.weights, call, channel) for rank, call in enumerate(calls)]
        return self.workers.wait(asked, doing=f"weight sync ({calls[0]})")

    def warm_up_sync(self, channel: str = "") -> None:
        """Has every rank compile what the first weight sync of that name needs, and does not wait for it. What fails
        here fails again, and is told, when the sync connects."""
        self.workers.ask_all(TrainerRank.weights, RankCall.of(SourceRank.warm_up), channel)

    def channel(self, name: str) -> SourceGroup:
        """Returns the source of a further weight sync, which connects to other engines by another plan."""
        return Channel(self, name)


class Channel(SourceGroup):
    """The ranks of a model as the source of one of several weight syncs."""

    def __init__(self, ranks: ModelGroup, name: str):
        self._ranks, self._name = ranks, name

    @property
    def num_ranks(self) -> int:
        """See SourceGroup."""
        return self._ranks.num_ranks

    def on_ranks(self, calls: Sequence[RankCall[SourceRank, T]]) -> list[T]:
        """See SourceGroup."""
        return self._ranks.on_channel(self._name, calls)


class PolicyGroup(ModelGroup):
    """The ranks of the policy, or of the model that is trained offline."""

    role = "policy"
    replays = True


class CriticGroup(ModelGroup):
    """The ranks of the critic: a model with one output, trained on the policy's batches."""

    role = "critic"

    def train(self, batch: Sequences) -> TrainResult:
        """Trains as ModelGroup.train does. The metrics are `critic/...`; the explained variance is that of the values
        before the update."""
        assert isinstance(batch, Batch)
        result = super().train(batch)
        names = {key: key.removeprefix("train/").replace("/", "_") for key in result.metrics}
        metrics = {f"critic/{names[key]}": value for key, value in result.metrics.items()}
        metrics["critic/explained_variance"] = explained_variance(batch)
        return replace(result, metrics=metrics)


def spared(steps: Sequence[list[Share]]) -> Int[np.ndarray, " N"]:
    """Returns the tokens that sequences of the shares need not compute, of those that have some."""
    counts = [share.batch.shared for shares in steps for share in shares if share.batch.shared is not None]
    found = np.concatenate([np.zeros(0, dtype=np.int64), *(each.numpy() for each in counts)])
    return found[found > 0]


def shared_fraction(steps: Sequence[list[Share]]) -> dict[str, float]:
    """Returns `train/shared_prompt_fraction` of the shares of all optimizer steps."""
    num_tokens = sum(share.batch.num_tokens for shares in steps for share in shares)
    return {"train/shared_prompt_fraction": int(spared(steps).sum()) / max(1, num_tokens)}


def is_kept(batch: Sequences) -> bool:
    """Returns whether sequences of a batch are marked as kept."""
    return isinstance(batch, TrainBatch) and batch.kept is not None


def kept_logprobs(
    minibatch: Sequences, plan: list[list[list[int]]], updates: list[UpdateResult]
) -> Float[Tensor, " T_kept"]:
    """Returns [T_kept] nats of the sequences of a minibatch that are marked as kept.

    Args:
        plan: the sequences of the micro-batches; see `split`.
        updates: the results of the ranks that report, by data-parallel index.
    """
    assert isinstance(minibatch, TrainBatch) and minibatch.kept is not None
    return join([each.kept_logprobs for each in updates], plan, minibatch.lengths * minibatch.kept)


def average(steps: list[dict[str, Metric]]) -> dict[str, float]:
    """Returns one number per key over the optimizer steps of a batch: pooled means, greatest peaks, mean sums."""
    return {
        key: float(metric.value) / (len(steps) if isinstance(metric, Sum) else 1)
        for key, metric in merge(steps).items()
    }
