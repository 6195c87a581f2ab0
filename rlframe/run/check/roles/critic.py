"""Rules about the critic. See the package."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import CriticConfig
from rlframe.models.families.base import Architecture
from rlframe.run.config import RunConfig
from rlframe.utils.faults import Fault

HOMES = {"train": "critic.train", "model": "critic.model"}
"""The critic's keys of the settings that the policy's rules name."""


def as_policy(run: RunConfig) -> RunConfig:
    """Returns the run with the critic's model and settings in place of the policy's."""
    return replace(run, model=run.critic_model, train=run.critic_train)


def faults(
    run: RunConfig, algorithm: OnlineAlgorithm, *, rules: Iterable[Callable[[RunConfig], Iterable[Fault]]]
) -> Iterator[Fault]:
    """Yields the faults that the policy's `rules` find in the critic's settings, without those they find in the
    policy's own."""
    if algorithm.critic_warmup_steps >= run.steps > 0:
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


def mtp_faults(run: RunConfig, architecture: Architecture) -> Iterator[Fault]:
    """Rejects the critic's own settings for multi-token prediction, for which it has no head.

    Settings that it has from the policy's are no fault.
    """
    mtp = run.critic_train.mtp
    if architecture.mtp_layers == 1 and mtp.keeps and mtp != run.train.mtp:
        why = "it does not predict tokens"
        yield Fault("critic.train.mtp.mode", "has no effect on a critic", got=mtp.mode, why=why, hint="remove it")


def unused_faults(run: RunConfig) -> Iterator[Fault]:
    """Reports critic settings if the algorithm has no critic."""
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
    """Rejects sleep settings of a critic that has devices of its own."""
    assert run.critic.train is not None
    engines = run.rollout.num_devices
    # Engines start on the policy's devices and continue on the critic's.
    beside_engines = run.cluster.colocate and engines > Parallel.parse(run.train.parallel).world
    if run.critic.train.sleeps and not (run.critic.colocate or beside_engines):
        setting = run.critic.train.sleep_setting
        yield Fault(f"critic.train.{setting}", "has no effect with critic.colocate=false", got="true", hint="remove it")
