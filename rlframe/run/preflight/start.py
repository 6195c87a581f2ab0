"""Memory of a start, in which models are built and engines start on the same devices."""

from rlframe.cluster.roles import ENGINES
from rlframe.run.preflight.parts import Phase, total
from rlframe.run.preflight.plan import Plan
from rlframe.run.preflight.trainer import MOMENTS


def fits_beside_builds(plan: Plan, *, resumes: bool) -> bool:
    """Returns whether the first devices have memory for engines that start while models are built there.

    A model that is built holds its weights, gradients and main weights at most. Adam creates its moments in the first
    step, or loads them when a run resumes.
    """
    device = plan.devices[0]
    needed = 0.0
    for process in device.processes:
        if process.role == ENGINES:
            needed += total(process.at(Phase.GENERATION))
        else:
            needed += total(part for part in process.resident if resumes or part.name != MOMENTS)
    return needed <= plan.accelerator.memory_bytes
