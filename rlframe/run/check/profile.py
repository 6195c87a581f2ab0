"""Rules about profiles. See the package."""

import os
import re
import shutil
import sys
from collections.abc import Iterator

from rlframe.cluster.config import Device
from rlframe.cluster.profiling.config import Tool
from rlframe.cluster.roles import ENGINES
from rlframe.run.check.context import critic_of, device_of, online
from rlframe.run.config import Mode, RunConfig
from rlframe.run.profiles import IN_PYTHON, RANKS, ROLES, roles, sizes
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

PLAIN_PATH = re.compile(r"[\w./+=:@%,-]+")
"""Paths that Ray can hand to nsys, which it does through a shell."""


SECTIONS = {
    *("profile", "mode", "steps", "algorithm", "train", "critic", "teacher", "judge", "reward", "rollout"),
    *("evaluation", "cluster"),
}
"""Sections that decide the steps and the processes of a run."""


def processes(run: RunConfig) -> Iterator[Fault]:
    """Checks that the steps and the processes of a profile are there, and that the tool can record them."""
    profile = run.profile
    if not profile.steps:
        return
    if run.mode is not Mode.TRAIN:
        yield Fault(
            "profile.steps",
            f"must be [] with mode={run.mode}",
            got=profile.steps,
            why="the steps of training are profiled",
        )
        return
    if late := [step for step in profile.steps if step > run.steps]:
        yield Fault("profile.steps", f"must not exceed steps={run.steps}", got=late)
    there = sizes(run, online=online(run), has_critic=critic_of(run) is not None)
    unknown = list(_role_faults(run, there))
    yield from unknown
    if not unknown:
        yield from _place_faults(run, there)
        if ENGINES in roles(run, there):
            yield from run.rollout.profile_faults(profile)


def _role_faults(run: RunConfig, there: dict[str, int]) -> Iterator[Fault]:
    """Yields a fault for each role that the run has not, or the tool cannot record."""
    profile = run.profile
    for name in profile.roles or ():
        if name not in ROLES:
            rule = f"must be of {', '.join(ROLES)}"
            yield Fault("profile.roles", rule, got=name, hint=did_you_mean(name, ROLES))
        elif name not in there:
            yield Fault("profile.roles", f"must be of {', '.join(there)}, which this run has", got=name)
        elif name in IN_PYTHON and profile.tool is not Tool.TORCH:
            yield Fault("profile.roles", f"must not hold {name}", why=f"tool={profile.tool} records GPUs only")


def _place_faults(run: RunConfig, there: dict[str, int]) -> Iterator[Fault]:
    """Yields a fault for ranks and engines that no profiled role has."""
    chosen = roles(run, there)
    for key, names in {"ranks": [name for name in chosen if name in RANKS], "engines": [ENGINES]}.items():
        wanted = getattr(run.profile, key)
        count = max((there[name] for name in names if name in chosen), default=0)
        if count == 0 and wanted != [0]:
            why = f"no role with {key} is profiled"
            yield Fault(f"profile.{key}", "has no effect", got=wanted, why=why, hint="remove it")
        elif count and (beyond := [place for place in wanted if place >= count]):
            have = ", ".join(f"{name} has {there[name]}" for name in names)
            yield Fault(f"profile.{key}", f"must be below {count} ({have}; they count from 0)", got=beyond)


def device(run: RunConfig) -> Iterator[Fault]:
    """Checks that the tool can record the devices."""
    profile = run.profile
    if profile.steps and profile.tool is not Tool.TORCH and device_of(run) is Device.CPU:
        what = "the kernels of GPUs" if profile.tool is Tool.NSYS else "the memory that torch allocates on GPUs"
        yield Fault("profile.tool", "must be torch on a CPU", got=profile.tool, why=f"{profile.tool} records {what}")


def nsys(run: RunConfig) -> Iterator[Fault]:
    """Checks that Ray can start processes under nsys."""
    if not run.profile.steps or run.profile.tool is not Tool.NSYS:
        return
    if shutil.which("nsys") is None:
        yield Fault(
            "profile.tool",
            "needs the program nsys on every node, and it is not on the PATH of this one",
            got=Tool.NSYS,
            why="it is part of Nsight Systems: https://developer.nvidia.com/nsight-systems",
            hint="install it, add its folder to PATH, or use profile.tool=torch",
        )
    found = shutil.which("python")
    if found is None or os.path.dirname(found) != os.path.dirname(sys.executable):
        yield Fault(
            "profile.tool",
            f"needs {sys.executable} to be the python of the PATH, with which Ray starts processes under nsys",
            got=Tool.NSYS,
            hint="activate its environment",
        )
    if not PLAIN_PATH.fullmatch(str(run.folder)):
        rule = "must be a path of letters, digits and ./+=:@%,-_ with profile.tool=nsys"
        yield Fault("output", rule, got=str(run.folder), why="Ray hands it to nsys through a shell")
