"""Settings of the teacher. Imports no ray and no megatron."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.megatron.config.parallel import Parallel
from rlframe.models.config import ModelConfig
from rlframe.rollout.base.config import RolloutConfig
from rlframe.utils.bounds import PathText, check_bounds
from rlframe.utils.errors import SettingError


class TeacherPlacement(StrEnum):
    """Processes in which the teacher's forward passes run."""

    WORKERS = "workers"
    """The policy's own ranks, in the policy's layout (train.parallel, without pipeline stages), with both models'
    weights. Only here can the teacher's whole distribution be compared with the policy's."""
    OWN = "own"
    """Ranks on devices of their own, with a layout of their own. They return its logprobs of sampled tokens, and of its
    most likely ones (algorithm.top_k)."""
    ENGINE = "engine"
    """Engines on devices of their own (teacher.engine), which return the same at temperature 1."""


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """The frozen teacher. It may have any family and size, but must have the policy's vocabulary."""

    path: Annotated[str, PathText()]
    """Name of an embedded model, a local folder in Hugging Face format, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id. null means the hub's default."""
    placement: TeacherPlacement = TeacherPlacement.WORKERS
    """Processes in which its forward passes run."""
    parallel: str | None = None
    """Layout of its own ranks, such as t2. null means d1. Only with placement=own."""
    engine: RolloutConfig | None = None
    """Engines that hold it, on devices of their own: a section like rollout. With placement=engine they score, and with
    algorithm.seq_kd they write responses, whatever the placement. Responses are sampled by the settings of rollout,
    like the policy's."""

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
                TeacherPlacement.WORKERS: "where the teacher has the policy's layout",
                TeacherPlacement.ENGINE: "where engine.tp splits it",
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
        """The model in the form of `ModelConfig`."""
        return ModelConfig(path=self.path, revision=self.revision)

    @property
    def own_layout(self) -> Parallel | None:
        """The layout of its own ranks. None if it has none."""
        return Parallel.parse(self.parallel or "d1") if self.placement is TeacherPlacement.OWN else None
