"""Distillation in the loops: the teacher's outputs in a step's batches."""

from dataclasses import replace
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import Algorithm
from rlframe.types.batch import Packed, Sequences, TopLogprobs


class Teacher(Protocol):
    """A teacher: the policy's ranks if they hold it, its own ranks, or its engines."""

    def teacher_logprobs(self, batch: Sequences) -> Float[Tensor, " T"]:
        """Returns [T] nats of each token; 0.0 at first tokens."""
        ...

    def teacher_top(self, batch: Sequences, *, k: int, temperature: float) -> TopLogprobs:
        """Returns the k most likely tokens in each token's place."""
        ...


def with_teacher(batch: Packed, *, teacher: Teacher, algorithm: Algorithm) -> Packed:
    """Returns the batch with the teacher's outputs that the algorithm needs."""
    if algorithm.divergence is None:
        return replace(batch, teacher_logprobs=teacher.teacher_logprobs(batch))
    top = teacher.teacher_top(batch, k=algorithm.divergence.top_k, temperature=algorithm.divergence.temperature)
    return replace(batch, teacher_top_ids=top.ids, teacher_top_logprobs=top.logprobs)
