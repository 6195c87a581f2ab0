"""What a rollout engine is. One file each; vLLM, SGLang and transformers differ only behind these methods."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from rlframe.rollout.base.gate import VersionGate
from rlframe.types.batch import TopLogprobs
from rlframe.types.rollout import Completion, GenerationRequest
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import DestinationRank

T = TypeVar("T")


class RolloutEngine(ABC):
    """Base of all engines. An engine's file ends `COMPONENT, CONFIG = TheEngine, TheConfig`.

    Two rules no engine may break: it samples only at a verified version, and every completion names the version of
    each of its tokens. The first is kept by `gate.enter()`, which `generate` and `score` call before they sample.

    Control calls (`on_ranks`, `pause`, `resume`, `abort`, `is_alive`) may come from another thread than a `generate`
    that is running.
    """

    max_calls: ClassVar[int] = 1
    """Calls of `generate` the engine can take at the same time, each from a thread of its own. With 1, the caller hands
    over all requests at once and the engine batches within the call."""
    """True when the engine has `top`."""
    gate: VersionGate
    """What is known of the weights. The caller moves it with each sync; the engine asks it before it samples."""
    weights_lost: bool = False
    """True between a sleep that dropped the weights and the next sync: what is in their place means nothing."""
    freed_bytes: int | None = None
    """Device memory that the last `sleep` gave back, over all ranks of the engine; None where it is not measured."""

    @abstractmethod
    def __init__(
        self,
        config: Any,
        *,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        random_seed: int | None = None,
        with_routes: bool = False,
    ):
        """Loads the model by the engine's own full path, so that calibration compares what the engine really holds.

        Args:
            config: of the file's CONFIG.
            folder: model and tokenizer in Hugging Face format.
            random_seed: draw the weights from this seed (`models.random_init`); the folder then needs none.
            with_routes: completions come with their routed experts, where `config.route_faults` finds none.
        """

    @abstractmethod
    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """One completion for each request, in their order. Thread-safe where `max_calls` is above 1.

        Raises:
            WeightSyncFailed: the weights in memory are not verified.
            EngineDied: the engine's own processes ended; it has to be made anew.
            ValueError: a prompt is empty, or longer with its response than the model's positions.
        """

    @abstractmethod
    def score(self, sequences: list[tuple[int, ...]]) -> list[list[float]]:
        """For each sequence the nats of each token but the first, given those before it, under log_softmax(logits).

        Temperature 1 and nothing filtered, whatever the sampling settings: what a trainer computes at temperature 1.

        Raises:
            WeightSyncFailed: the weights in memory are not verified.
        """

    @abstractmethod
    def top(self, sequences: list[tuple[int, ...]], k: int) -> list[TopLogprobs]:
        """For each sequence the k likeliest tokens in the place of each token but the first, by `score`'s rule.

        Raises:
            WeightSyncFailed: the weights in memory are not verified.
        """

    @abstractmethod
    def on_ranks(self, calls: Sequence[RankCall[DestinationRank, T]]) -> list[T]:
        """Returns what each rank's WeightDestination answers to its call, all ranks at once.

        Args:
            calls: one for each rank: 1 for an engine of one process, tp for a tensor-parallel one.
        """

    @abstractmethod
    def pause(self) -> None:
        """Running requests stop where they are and keep what they have; returns when none is computing any more.

        After `resume` they go on, with the keys and values of their prefix computed anew by the weights of then.
        """

    @abstractmethod
    def resume(self) -> None:
        """Undoes `pause`; nothing computed by earlier weights is read again, the prefix cache included."""

    @abstractmethod
    def abort(self) -> None:
        """Every running request returns now, with finish_reason ABORT and the tokens it has."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees what can be made again, so that training may use the device. Sets `weights_lost` where the weights are
        dropped too, and `freed_bytes` where it is measured."""

    @abstractmethod
    def wake_weights(self) -> None:
        """The weights have memory again, ready for a sync; what it holds is undefined where they were dropped."""

    @abstractmethod
    def wake(self) -> None:
        """Undoes `sleep`: everything has memory again."""

    @abstractmethod
    def is_alive(self) -> bool:
        """False when a process of the engine has ended, so that it must be made anew."""

    @abstractmethod
    def close(self) -> None:
        """Gives back memory and processes; the engine is not used again."""
