"""Settings of profiles. Imports no ray and no torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError

FOLDER = "profiles"
"""Folder of a run's profiles."""
NSYS_FOLDER = f"{FOLDER}/nsys"
"""Folder of the reports of nsys, whose names are chosen when a process starts."""
DRIVER, RUNNER = "driver", "runner"
"""Roles of the process that runs the loop, and of the one that attempts prompts. They compute in Python alone."""


class Tool(StrEnum):
    """Profilers."""

    TORCH = "torch"
    """torch.profiler: operators, kernels and phases as a trace, for https://ui.perfetto.dev. Python stacks of the
    driver and the runner, for https://speedscope.app."""
    NSYS = "nsys"
    """Nsight Systems: kernels, CUDA calls and phases as a report, for its own viewer. Needs `nsys` on every node."""
    MEMORY = "memory"
    """The allocations of torch on a GPU as a snapshot, for https://pytorch.org/memory_viz."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Settings of profiles of single steps, in the folder `profiles` of the run."""

    steps: Annotated[list[int], Range(1, 10**9)] = field(default_factory=list)
    """Numbers of the steps to profile, such as [10,12]. A profiled step is slower. [] profiles none."""
    tool: Tool = Tool.TORCH
    """The profiler."""
    roles: list[str] | None = None
    """Roles to profile: policy, critic, teacher, reward_model, engines, runner, driver. null means each of them that
    the run has and the tool can record."""
    ranks: Annotated[list[int], Range(0, 1 << 20)] = field(default_factory=lambda: [0])
    """Ranks to profile of the roles that train or score: policy, critic, teacher and reward_model."""
    engines: Annotated[list[int], Range(0, 4096)] = field(default_factory=lambda: [0])
    """Engines to profile, each with all its ranks."""
    stacks: bool = False
    """Whether traces hold the Python functions of ranks and engines too, which makes them larger and the step slower.
    Only with tool=torch."""
    nsys_options: dict[str, str] = field(default_factory=dict)
    """Further options of `nsys profile`, by their long names, such as {gpu-metrics-devices: all}. Only with
    tool=nsys."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("steps", "roles", "ranks", "engines"):
            values = getattr(self, name) or []
            if len(set(values)) < len(values):
                raise SettingError(name, "must name each once", got=values)
        for name in ("roles", "ranks", "engines"):
            if getattr(self, name) == []:
                raise SettingError(name, "must not be empty", got="[]", hint="use steps=[] to profile nothing")
        if self.stacks and self.tool is not Tool.TORCH:
            raise SettingError("stacks", f"has no effect with tool={self.tool}; remove it", got="true")
        if self.nsys_options and self.tool is not Tool.NSYS:
            raise SettingError("nsys_options", f"has no effect with tool={self.tool}; remove it", got=self.nsys_options)


def step_folder(step: int) -> str:
    """Returns the folder of a step's profiles, relative to the run's."""
    return f"{FOLDER}/step_{step}"
