"""Processes that Ray starts under nsys, which records their GPU while they profile a step."""

from dataclasses import replace

from rlframe.algorithms.requirements import Requirements
from rlframe.cluster.placement import Placement
from rlframe.cluster.profiling.config import NSYS_FOLDER, Tool
from rlframe.run.config import RunConfig
from rlframe.run.profiles import profiled

OPTIONS = {
    "t": "cuda,nvtx,cudnn,cublas",
    "capture-range": "cudaProfilerApi",
    # A report for each step, which is whole when the step is over: Ray kills the processes at the end.
    "capture-range-end": "repeat",
    "sample": "none",
    "cpuctxsw": "none",
    "force-overwrite": "true",
}
"""Options of `nsys profile`."""


def under_nsys(config: RunConfig, required: Requirements, placement: Placement) -> None:
    """Makes Ray start the processes under nsys that it is to record."""
    if not config.profile.steps or config.profile.tool is not Tool.NSYS:
        return
    folder = config.folder / NSYS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for role, ranks in profiled(config, online=required.online, has_critic=required.critic).items():
        for rank in ranks:
            options = OPTIONS | {"o": str(folder / f"{role}_{rank}")} | config.profile.nsys_options
            placement.slots[role][rank] = replace(placement.slots[role][rank], runtime_env={"nsight": options})
