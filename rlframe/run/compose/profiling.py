"""Composes the profiles of a run: the processes, and what records their steps."""

from rlframe.cluster.profiling.config import DRIVER, FOLDER, RUNNER
from rlframe.cluster.roles import ENGINES
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.loops.base import Loop
from rlframe.loops.online import OnlineLoop
from rlframe.loops.profiler import Process, Profiler
from rlframe.rollout.fleet.worker import EngineProfile
from rlframe.run.compose.parts import Parts
from rlframe.run.profiles import profiled


def processes_of(parts: Parts) -> dict[str, list[int]]:
    """Returns the ranks that are profiled, by role."""
    required = parts.requirements
    return profiled(parts.config, online=required.online, has_critic=required.critic)


def engine_profile(parts: Parts) -> EngineProfile | None:
    """Returns the profiles that the policy's engines must know from their start, if they are profiled."""
    if ENGINES not in processes_of(parts):
        return None
    return EngineProfile(config=parts.config.profile, folder=str(parts.folder / FOLDER))


def profiler(parts: Parts, loop: Loop) -> Profiler:
    """Returns what records the steps of a loop."""
    chosen = processes_of(parts)
    if done := [step for step in parts.config.profile.steps if step <= (parts.done_steps or 0)]:
        loop.metrics.print_line(f"warning: profile.steps: {done} are done already, and are not profiled")
    workers: dict[str, WorkerGroup] = {group.role: group.workers for group in parts.groups}
    if isinstance(loop, OnlineLoop):
        workers |= {ENGINES: loop.rollout.workers, RUNNER: loop.attempts.workers}
    return Profiler(
        parts.config.profile,
        parts.folder,
        [
            Process(role=role, rank=rank, workers=workers[role])
            for role, ranks in chosen.items()
            if role != DRIVER
            for rank in ranks
        ],
        with_driver=DRIVER in chosen,
        marks=loop.metrics.marks,
        say=loop.metrics.print_line,
    )
