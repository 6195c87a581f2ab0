"""The roles of a run: policy, further models, engines. Imports no ray and no megatron."""

from collections.abc import Iterator

from rlframe.cluster.roles import (
    CRITIC,
    ENGINES,
    JUDGE_ENGINES,
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
from rlframe.rollout.base.config import RolloutConfig
from rlframe.run.config import RunConfig
from rlframe.run.teacher import TeacherPlacement


def topology(run: RunConfig, *, online: bool, has_critic: bool) -> Topology:
    """Returns every role of a run, in the order in which they get devices."""
    if not run.trains(online=online):
        return Topology(tuple(sampling_roles(run)))
    roles = [policy(Parallel.parse(run.train.parallel).world), *auxiliary_roles(run, has_critic=has_critic)]
    if online and run.rollout.replay is None:
        roles.append(
            engines(
                run.rollout.num_engines,
                devices_per_engine=run.rollout.devices_per_engine,
                engines_per_device=run.rollout.engines_per_device,
                colocate=run.cluster.colocate,
            )
        )
    return Topology(tuple(roles))


def sampling_roles(run: RunConfig) -> Iterator[Role]:
    """Yields the models of a run that trains none, each on devices of its own."""
    yield _own_engines(ENGINES, run.rollout, setting="rollout.num_engines")
    if run.judge:
        yield _own_engines(JUDGE_ENGINES, run.judge.engine, setting="judge.engine")
    if model := run.reward.model:
        world = Parallel.parse(model.parallel).world
        yield auxiliary(REWARD_MODEL, world, colocate=False, setting="reward.model.parallel")


def auxiliary_roles(run: RunConfig, *, has_critic: bool) -> Iterator[Role]:
    """Yields the models other than the policy, an entry each. One without an entry is in the policy's own ranks."""
    if has_critic:
        yield auxiliary(CRITIC, Parallel.parse(run.critic_train.parallel).world, colocate=run.critic.colocate)
    # Never on the policy's devices: there a teacher could as well be in the policy's ranks.
    if run.teacher and (layout := run.teacher.own_layout):
        yield auxiliary(TEACHER, layout.world, colocate=False, setting="teacher.placement=own")
    if run.teacher and (engine := teacher_engine(run)):
        yield _own_engines(TEACHER_ENGINES, engine, setting="teacher.engine")
    if run.judge and run.rollout.replay is None:
        yield _own_engines(JUDGE_ENGINES, run.judge.engine, setting="judge.engine")
    if (model := run.reward.model) and run.rollout.replay is None:
        setting = f"reward.model.colocate={str(model.colocate).lower()}"
        world = Parallel.parse(model.parallel).world
        yield auxiliary(REWARD_MODEL, world, colocate=model.colocate, setting=setting)


def _own_engines(name: str, engine: RolloutConfig, *, setting: str) -> Role:
    """Returns the role of engines on devices of their own."""
    num_ranks = engine.num_engines * engine.devices_per_engine
    return Role(
        name=name,
        num_actors=engine.num_engines,
        devices_per_actor=engine.devices_per_engine,
        actors_per_device=engine.engines_per_device,
        place=Place.OWN,
        setting=f"{name} ({num_ranks} ranks, {setting})",
    )


def teacher_engine(run: RunConfig) -> RolloutConfig | None:
    """Returns the settings of the teacher's engines, if they are started: a replay has the responses they wrote."""
    if run.teacher is None or (run.rollout.replay and run.teacher.placement is not TeacherPlacement.ENGINE):
        return None
    return run.teacher.engine
