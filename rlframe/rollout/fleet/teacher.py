"""TeacherEngines: a teacher that runs in engines like the policy's, but never receives a weight sync."""

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.rollout.fleet.frozen import FrozenEngines
from rlframe.rollout.fleet.loads import Loads
from rlframe.rollout.fleet.worker import ScoringWorker
from rlframe.types.batch import Sequences, TopLogprobs
from rlframe.types.input import ModelInput

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class TeacherEngines(FrozenEngines):
    """Engines that score given tokens and write responses, through `Attempts`."""

    role = "teacher_engines"

    def teacher_logprobs(self, batch: Sequences) -> Float[Tensor, " T"]:
        """Returns [T] nats of each token at temperature 1; 0.0 at first tokens."""
        scores = self._judged(ScoringWorker.score, batch)
        return torch.cat([torch.tensor([0.0, *nats], dtype=torch.float32) for nats in scores])

    def teacher_top(self, batch: Sequences, *, k: int, temperature: float) -> TopLogprobs:
        """Returns the teacher's most likely tokens in the place of each token."""
        assert temperature == 1, "refused by config.check"
        found = self._judged(ScoringWorker.top, batch, k)
        first = torch.zeros(1, 2 * k + 1)
        ids = [rows for each in found for rows in (first[:, :k].int(), each.ids)]
        logprobs = [rows for each in found for rows in (first[:, k:], each.logprobs)]
        return TopLogprobs(ids=torch.cat(ids), logprobs=torch.cat(logprobs))

    def _judged(
        self,
        method: Callable[[ScoringWorker, list[ModelInput], *Ts], list[T]],
        batch: Sequences,
        *arguments: *Ts,
    ) -> list[T]:
        """Scores the sequences, which the engines share, and returns an engine's answer for each."""
        lengths = batch.lengths.tolist()
        sequences = [ModelInput(row.numpy()) for row in batch.token_ids.split(lengths)]
        num_engines = len(self.workers.actors)
        dealt = Loads(num_engines).deal(lengths)
        shares = [[index for index, own in enumerate(dealt) if own == engine] for engine in range(num_engines)]
        busy = [engine for engine, share in enumerate(shares) if share]

        def ask() -> list[list[T]]:
            calls = [
                self.workers.ask(engine, method, [sequences[index] for index in shares[engine]], *arguments)
                for engine in busy
            ]
            return self.workers.wait(calls, doing=f"teacher {method.__name__}", ranks=busy)

        answers = self.retry_after_restart(ask)
        by_sequence = {
            index: answer
            for engine, given in zip(busy, answers, strict=True)
            for index, answer in zip(shares[engine], given, strict=True)
        }
        return [by_sequence[index] for index in range(len(lengths))]
