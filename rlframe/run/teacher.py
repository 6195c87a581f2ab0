"""Settings of the teacher. Light: imports no ray and no megatron."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.megatron.config.parallel import Parallel
from rlframe.models.config import ModelConfig
from rlframe.rollout.base.config import RolloutConfig
from rlframe.utils.bounds import PathText, check_bounds
from rlframe.utils.errors import SettingError


class TeacherPlacement(StrEnum):
    """Where the teacher's forward passes run."""

    WORKERS = "workers"
    """In the policy's own ranks, cut as the policy is (train.parallel, without pipeline stages), its weights beside the
    policy's: the only place where its whole distribution meets the policy's."""
    OWN = "own"
    """In ranks on devices of their own, with a layout of their own: for its logprobs of sampled tokens, and of its
    likeliest ones (algorithm.top_k)."""
    ENGINE = "engine"
    """In engines on devices of their own (teacher.engine), for the same at temperature 1."""


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """The frozen model to learn from: of any family and size, with the policy's vocabulary."""

    path: Annotated[str, PathText()]
    """An embedded model's name, a local folder in Hugging Face format, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; the hub's default when null."""
    placement: TeacherPlacement = TeacherPlacement.WORKERS
    """Where its forward passes run."""
    parallel: str | None = None
    """Layout of its own ranks, such as t2; d1 when null. Only with placement=own."""
    engine: RolloutConfig | None = None
    """Engines that hold it, on devices of their own: a section like rollout. They judge with placement=engine, and with
    algorithm.seq_kd they write responses, whatever judges; those are sampled as rollout says, like the policy's."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.path:
            raise SettingError("path", "must name a model", got="an empty string")
        if self.placement is TeacherPlacement.ENGINE and self.engine is None:
            raise SettingError(
                "engine", "must name an engine with placement=engine, such as engine.name=vllm", got="nothing"
            )
        if self.parallel is None:
            return
        if self.placement is not TeacherPlacement.OWN:
            where = {
                TeacherPlacement.WORKERS: "where the teacher is cut as the policy is",
                TeacherPlacement.ENGINE: "where engine.tp cuts it",
            }
            raise SettingError(
                "parallel",
                f"has no effect with placement={self.placement}, {where[self.placement]}",
                got=self.parallel,
                hint="remove it or use placement=own",
            )
        try:
            Parallel.parse(self.parallel)
        except ValueError as error:
            raise SettingError("parallel", "is wrong", why=f"{error}") from error

    @property
    def model(self) -> ModelConfig:
        """The model as other parts name one."""
        return ModelConfig(path=self.path, revision=self.revision)

    @property
    def own_layout(self) -> Parallel | None:
        """The layout of its own ranks; None when it has none."""
        return Parallel.parse(self.parallel or "d1") if self.placement is TeacherPlacement.OWN else None
