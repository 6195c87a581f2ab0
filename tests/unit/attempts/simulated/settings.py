"""The settings of a simulated run, drawn from a seed."""

from dataclasses import dataclass, replace
from random import Random

from rlframe.rollout.base.config import OversampleRest


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sizes of a run and what goes wrong in it."""

    seed: int
    steps: int
    lag: int
    depth: int
    prompts_per_step: int
    group_size: int
    num_prompts: int
    num_engines: int
    max_calls: int
    dynamic: bool
    scorer: bool
    num_minibatches: int
    in_flight_updates: bool
    checkpoint_every: int
    evaluate_every: int
    raises: float
    """Share of turns in which the environment raises."""
    deadline: float
    """Seconds that an attempt may take. 0: no attempt is left out for its time."""
    death_every_s: float
    """Mean time between deaths."""
    num_deaths: int
    """Greatest number of deaths."""
    aside_share: float
    """Greatest share of an evaluation beside training."""
    oversample: float = 1.0
    rest: OversampleRest = OversampleRest.CARRY
    """What becomes of groups that are not done, with oversampling."""
    plain: bool = False
    """Whether everything answers at once and nothing dies."""

    @property
    def takes_turns(self) -> bool:
        """Returns whether engines do nothing while the policy trains."""
        return self.lag == 0 or self.oversample > 1

    def as_plain(self) -> "Settings":
        """Returns the same run without delays and deaths."""
        return replace(self, plain=True, num_deaths=0)


def drawn(seed: int) -> Settings:
    """Returns the settings of a seed."""
    rng = Random(f"settings {seed}")
    prompts_per_step = rng.choice([1, 2, 2, 3, 4])
    group_size = rng.choice([1, 2, 2, 3])
    return Settings(
        seed=seed,
        steps=rng.randint(3, 7),
        lag=rng.choice([0, 0, 1, 1, 2, 4]),
        depth=rng.choice([1, 1, 2, 4]),
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        num_prompts=rng.randint(3, 14),
        num_engines=rng.choice([1, 2, 3]),
        max_calls=rng.choice([1, 4, 64]),
        dynamic=group_size > 1 and rng.random() < 0.4,
        scorer=rng.random() < 0.2,
        num_minibatches=rng.choice([1, 1, prompts_per_step]),
        in_flight_updates=rng.random() < 0.6,
        checkpoint_every=rng.choice([1, 2, 3, 100]),
        evaluate_every=rng.choice([1, 2, 100]),
        raises=rng.choice([0.0, 0.0, 0.05]),
        deadline=rng.choice([0.0, 0.0, 20.0]),
        death_every_s=rng.choice([3.0, 10.0, 30.0]),
        num_deaths=rng.choice([0, 3, 6, 10]),
        aside_share=rng.choice([0.05, 0.3, 1.0]),
    )


def drawn_with_oversampling(seed: int) -> Settings:
    """Returns the settings of a seed, of a run that begins more groups than it trains on."""
    rng = Random(f"oversampling {seed}")
    settings = drawn(seed)
    if rng.random() < 0.4:
        return replace(settings, lag=0, oversample=rng.choice([1.1, 1.5, 2.0, 3.0]), rest=OversampleRest.DROP)
    lag = max(1, settings.lag)
    return replace(settings, lag=lag, in_flight_updates=True, oversample=rng.choice([1.1, 1.5, 2.0, lag + 1.0]))
