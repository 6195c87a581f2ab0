"""Rules about the replay of routed experts. See the package."""

from collections.abc import Iterator

from rlframe.algorithms.base import Algorithm
from rlframe.run.config import RunConfig
from rlframe.utils.faults import Fault

KEY = "train.moe.router_replay"


def faults(run: RunConfig, algorithm: Algorithm, *, cuda: bool) -> Iterator[Fault]:
    """Checks that engines sample, and can return the routed experts.

    Args:
        cuda: whether engines run on CUDA.
    """
    if not run.train.moe.router_replay:
        return
    if not (algorithm.requirements.online and algorithm.requirements.samples_policy):
        yield Fault(
            KEY,
            f"has no effect with algorithm.name={run.algorithm.name}, with which the policy samples nothing",
            got="true",
            hint="remove it",
        )
        return
    for fault in run.rollout.route_faults(cuda=cuda):
        yield Fault(KEY, "cannot work", got="true", why=f"{fault}", stated=True)
