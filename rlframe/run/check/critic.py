"""Rules for the critic. See the package."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import CriticConfig
from rlframe.run.config import RunConfig
from rlframe.utils.faults import Fault

HOMES = {"train": "critic.train", "model": "critic.model"}
"""Where the critic has the settings that the policy's rules speak of."""


def as_policy(run: RunConfig) -> RunConfig:
    """The run with the critic's model and settings in the policy's place."""
    return replace(run, model=run.critic_model, train=run.critic_train)


def faults(
    run: RunConfig, algorithm: OnlineAlgorithm, *, rules: Iterable[Callable[[RunConfig], Iterable[Fault]]]
) -> Iterator[Fault]:
    """What the policy's `rules` find in the critic's settings, besides what they find in the policy's own."""
    if algorithm.critic_warmup_steps >= run.steps:
        yield Fault(
            "algorithm.critic_warmup_steps",
            f"must be below steps={run.steps}",
            got=algorithm.critic_warmup_steps,
            why="the policy would never be trained",
        )
    lora = run.critic_train.lora
    if lora and lora.path and run.train.lora and lora.path == run.train.lora.path:
        yield Fault(
            "critic.train.lora.path",
            "must not be the policy's adapter",
            got=f"{lora.path}, which has no head of values",
            hint="set critic.train.lora.path=null",
        )
    for rule in rules:
        known = list(rule(run))
        for fault in rule(as_policy(run)):
            if fault not in known:
                yield fault.moved(HOMES)


def unused_faults(run: RunConfig) -> Iterator[Fault]:
    """Settings of a critic that there is not."""
    defaults = CriticConfig()
    for field in fields(CriticConfig):
        value = getattr(run.critic, field.name)
        if value != getattr(defaults, field.name):
            got = value if isinstance(value, bool) else ""
            yield Fault(
                f"critic.{field.name}",
                f"has no effect with algorithm.name={run.algorithm.name}",
                got=got,
                hint="remove it",
            )


def sleep_faults(run: RunConfig) -> Iterator[Fault]:
    """A critic that has its devices to itself has no reason to sleep."""
    assert run.critic.train is not None
    engines = run.rollout.num_engines * run.rollout.devices_per_engine
    # Engines begin on the policy's devices and go on to the critic's.
    beside_engines = run.cluster.colocate and engines > Parallel.parse(run.train.parallel).world
    if run.critic.train.offload_optimizer and not (run.critic.colocate or beside_engines):
        yield Fault(
            "critic.train.offload_optimizer", "has no effect with critic.colocate=false", got="true", hint="remove it"
        )
