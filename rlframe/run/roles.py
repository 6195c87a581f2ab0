"""The roles of a run: policy, further models, engines. Imports no ray and no megatron."""

from collections.abc import Iterator

from rlframe.cluster.roles import (
    CRITIC,
    REWARD_MODEL,
    TEACHER,
    TEACHER_ENGINES,
    Place,
    Role,
    Topology,
    auxiliary,
    engines,
    policy,
)
from rlframe.megatron.config.parallel import Parallel
from rlframe.run.config import RunConfig


def topology(run: RunConfig, *, online: bool, has_critic: bool) -> Topology:
    """Returns every role of a run, in the order in which they get devices."""
    roles = [policy(Parallel.parse(run.train.parallel).world), *auxiliary_roles(run, has_critic=has_critic)]
    if online:
        size, colocate = run.rollout.devices_per_engine, run.cluster.colocate
        roles.append(engines(run.rollout.num_engines, devices_per_engine=size, colocate=colocate))
    return Topology(tuple(roles))


def auxiliary_roles(run: RunConfig, *, has_critic: bool) -> Iterator[Role]:
    """Yields the models other than the policy, an entry each. One without an entry is in the policy's own ranks."""
    if has_critic:
        yield auxiliary(CRITIC, Parallel.parse(run.critic_train.parallel).world, colocate=run.critic.colocate)
    # Never on the policy's devices: there a teacher could as well be in the policy's ranks.
    if run.teacher and (layout := run.teacher.own_layout):
        yield auxiliary(TEACHER, layout.world, colocate=False, setting="teacher.placement=own")
    if run.teacher and (engine := run.teacher.engine):
        num_ranks = engine.num_engines * engine.devices_per_engine
        yield Role(
            name=TEACHER_ENGINES,
            num_actors=engine.num_engines,
            devices_per_actor=engine.devices_per_engine,
            place=Place.OWN,
            setting=f"{TEACHER_ENGINES} ({num_ranks} ranks, teacher.engine)",
        )
    if model := run.reward.model:
        setting = f"reward.model.colocate={str(model.colocate).lower()}"
        world = Parallel.parse(model.parallel).world
        yield auxiliary(REWARD_MODEL, world, colocate=model.colocate, setting=setting)
