"""A sample of the campaign of configurations, other than the campaign's own."""

from collections.abc import Iterator

import pytest

from tests.campaigns.configurations import base, remembering, sample, tried
from tests.campaigns.trials import Outcome

SEED = 7
COUNT = 60
SOME = ("dapo", "grpo with kl", "ppo", "gkd", "dpo")
"""Each other experiment costs half a second to compose; together these have every section."""


@pytest.fixture(autouse=True)
def data_is_read_once() -> Iterator[None]:
    end = remembering()
    yield
    end()


def test_a_hostile_value_anywhere_is_refused_by_its_key_or_used() -> None:
    trials = [tried(attempt) for attempt in sample(COUNT, seed=SEED, experiments=SOME)]
    assert [f"{trial.name}: {trial.said}" for trial in trials if trial.outcome is Outcome.WRONG] == []
    assert len({trial.name for trial in trials}) == COUNT


def test_every_section_is_among_the_experiments() -> None:
    keys = {leaf.key for experiment in SOME for leaf in base(experiment)[1]}
    for key in ("train.lora.rank", "critic.train.optimizer.lr", "teacher.path", "algorithm.adaptive_kl.gain"):
        assert key in keys
