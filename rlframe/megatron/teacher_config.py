"""Settings of the teacher. Imports neither torch nor megatron."""

from dataclasses import dataclass, replace
from enum import StrEnum

from rlframe.megatron.config import OptimizerConfig, TrainConfig
from rlframe.megatron.layout import Parallel
from rlframe.megatron.options import CommunicationConfig, Fp8Config, MoeConfig, Recompute, RecomputeConfig
from rlframe.models.config import ModelConfig


class TeacherPlacement(StrEnum):
    """Where the teacher's forward passes run."""

    WORKERS = "workers"
    """In the policy's own ranks, cut as the policy is (train.parallel, without pipeline stages), its weights beside the
    policy's: the only place where its whole distribution meets the policy's."""
    OWN = "own"
    """In ranks on devices of their own, with a layout of their own: for its logprobs of sampled tokens."""


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """The frozen model to learn from: of any family and size, with the policy's vocabulary."""

    path: str
    """An embedded model's name, a local folder in Hugging Face format, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; the hub's default when null."""
    placement: TeacherPlacement = TeacherPlacement.WORKERS
    """Where its forward passes run."""
    parallel: str | None = None
    """Layout of its own ranks, such as t2; d1 when null. Only with placement=own."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path must name a model, got an empty string")
        if self.parallel is None:
            return
        if self.placement is TeacherPlacement.WORKERS:
            raise ValueError(
                f"parallel has no effect with placement=workers, where the teacher is cut as the policy is, got "
                f"{self.parallel}; remove it or use placement=own"
            )
        try:
            Parallel.parse(self.parallel)
        except ValueError as error:
            raise ValueError(f"parallel is wrong: {error}") from error

    @property
    def model(self) -> ModelConfig:
        """The model as other parts name one."""
        return ModelConfig(path=self.path, revision=self.revision)

    @property
    def own_layout(self) -> Parallel | None:
        """The layout of its own ranks; None when it has none."""
        return Parallel.parse(self.parallel or "d1") if self.placement is TeacherPlacement.OWN else None


def forward_only(train: TrainConfig, layout: Parallel) -> TrainConfig:
    """The policy's settings as a teacher cut by `layout` has use for them: the number format, kernels, how tokens reach
    experts, and a token budget that the policy's longest sequence fits.

    What is for gradients (recomputation, adapters, the optimizer) or for the policy's own experts is left out, and so
    is FP8, for which the teacher's sizes may not do.
    """
    return replace(
        train,
        parallel=layout,
        max_tokens_per_microbatch=-(-train.sequence_tokens // layout.cp),
        recompute=Recompute.NONE,
        recompute_options=RecomputeConfig(),
        communication=CommunicationConfig(),
        moe=MoeConfig(dispatcher=train.moe.dispatcher),
        fp8=Fp8Config(),
        optimizer=OptimizerConfig(),
        lora=None,
    )
