"""Tasks of reasoning-gym as homework: what it says, and what it keeps from the model."""

from collections import Counter

import pytest
import yaml

from rlframe.data import builtin
from rlframe.data.builtin.arithmetic import Split
from rlframe.data.builtin.reasoning_gym_homework import COMPLEX_SUM, NAME, SPELL_BACKWARD, exchanged, half_added
from rlframe.data.config import DataConfig
from rlframe.data.sources import load
from rlframe.data.text.conversations import understand
from rlframe.rewards.base import build_reward
from rlframe.rewards.config import RewardTerm
from tests.meta.checkout import ROOT
from tests.unit.data.builtin.test_reasoning_gym import attempt

CONFIG = yaml.safe_load((ROOT / "configs/data/reasoning_gym.yaml").read_text())


def test_careless_answers() -> None:
    assert half_added({"num1": (1.0, 4.0), "num2": (9.0, 7.0)}) == "10.0 + 4.0i"
    assert exchanged({"word": "ohmic"}) == "chmio"
    assert exchanged({"word": "sun"}) == "nus", "which is right"


@pytest.mark.thorough
def test_one_copy_in_three_is_right_and_what_the_recipe_holds_out_is_kept_from_the_model() -> None:
    data = DataConfig(**CONFIG)
    paths = [entry.path for entry in data.entries()]
    tasks = {
        record.fields["prompt"]: record.fields
        for path in paths
        for split in Split
        for record in builtin.records(path, split)
    }
    reward = build_reward(RewardTerm(name="reasoning_gym"), key="reward.parts.r")
    homework = builtin.records(NAME, Split.TRAIN)
    right = Counter(
        reward.score(attempt(record.fields["answer"], tasks[record.fields["prompt"]])) == 1.0
        for record in homework[:300] + homework[-300:]
    )
    assert 200 <= right[True] <= 260, "a few careless answers are right"
    held_out = {record.fields["prompt"] for path in paths for record in builtin.records(path, Split.HELD_OUT)}
    learned = load(DataConfig(path=NAME), seed=0, understand=understand).train[0]
    assert not held_out & {one.prompt[0]["content"] for one in learned}


def test_the_recipe_trains_on_what_the_homework_is_of() -> None:
    data = DataConfig(**CONFIG)
    assert [entry.path for entry in data.entries()] == [COMPLEX_SUM, SPELL_BACKWARD]
    assert data.channels() == ("complex_arithmetic", "spell_backward")
