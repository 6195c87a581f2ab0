"""The processes of a run that are profiled. Imports no ray and no megatron."""

from rlframe.cluster.profiling.config import DRIVER, RUNNER, Tool
from rlframe.cluster.roles import CRITIC, ENGINES, POLICY, REWARD_MODEL, TEACHER
from rlframe.run.config import RunConfig
from rlframe.run.roles import topology

RANKS = (POLICY, CRITIC, TEACHER, REWARD_MODEL)
"""Roles whose processes are ranks."""
IN_PYTHON = (RUNNER, DRIVER)
"""Roles that only tool=torch records."""
ROLES = (*RANKS, ENGINES, *IN_PYTHON)
"""All roles that can be profiled."""


def sizes(run: RunConfig, *, online: bool, has_critic: bool) -> dict[str, int]:
    """Returns the roles of the run that can be profiled, with their numbers of processes."""
    found = {role.name: role.num_actors for role in topology(run, online=online, has_critic=has_critic).roles}
    found = {name: count for name, count in found.items() if name in ROLES}
    if ENGINES in found:
        # The last ones only evaluate.
        found |= {ENGINES: found[ENGINES] - run.evaluation.num_engines, RUNNER: 1}
    return found | {DRIVER: 1}


def roles(run: RunConfig, sizes: dict[str, int]) -> list[str]:
    """Returns the roles that are profiled: those of the setting, or those that the tool can record."""
    if run.profile.roles is not None:
        return run.profile.roles
    found = [name for name in sizes if run.profile.tool is Tool.TORCH or name not in IN_PYTHON]
    return [name for name in found if name != ENGINES or not any(run.rollout.profile_faults(run.profile))]


def profiled(run: RunConfig, *, online: bool, has_critic: bool) -> dict[str, list[int]]:
    """Returns the ranks that are profiled, by role. Empty if no step is."""
    if not run.profile.steps:
        return {}
    there = sizes(run, online=online, has_critic=has_critic)
    wanted = dict.fromkeys(RANKS, run.profile.ranks) | {ENGINES: run.profile.engines}
    return {role: [rank for rank in wanted.get(role, [0]) if rank < there[role]] for role in roles(run, there)}
