"""Which answer a response gives, as rewards read it, and classes of users that lack a method."""

from pathlib import Path
from typing import Any

import pytest

from rlframe.rewards.base import Attempt
from rlframe.rewards.config import Per, RewardConfig, RewardTerm
from rlframe.rewards.extracting import Extracting, extracted
from rlframe.rewards.scoring import Scoring
from rlframe.types.rollout import FinishReason
from rlframe.utils.errors import RewardError

pytestmark = pytest.mark.later
OWN = """
from dataclasses import dataclass
from rlframe.rewards.base import Reward

@dataclass
class Settings:
    pass

class Bare(Reward):
    def __init__(self, config: Settings):
        pass

class Whole(Bare):
    def score(self, attempt):
        return 1.0
    def extract(self, attempt):
        return attempt.response_text[0] if attempt.response_text else None

class OfGroups(Bare):
    def score_group(self, attempts):
        return [0.0] * len(attempts)

class WithoutSettings(Reward):
    def score(self, attempt):
        return 1.0

class NoReward:
    def score(self, attempt):
        return 1.0

def function(response, answer):
    return 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def attempt(response: str) -> Attempt:
    return Attempt(
        prompt_text="", response_text=response, answer="4", num_response_tokens=1, finish_reason=FinishReason.STOP
    )


@pytest.mark.parametrize(
    ("name", "options", "response", "answer"),
    [
        ("exact_match", {}, " 4\n", "4"),
        ("exact_match", {"last_line": True, "ignore_case": True}, "So:\nFour ", "four"),
        ("last_number", {}, "4 + 1,000.50 make", "1000.5"),
        ("last_number", {}, "-0", "0"),
        ("last_number", {}, "none", None),
        ("math_verify", {}, r"so \boxed{\frac{2}{4}}", "1/2"),
        ("math_verify", {}, "no", None),
    ],
)
def test_rewards_read_answers(name: str, options: dict[str, Any], response: str, answer: str | None) -> None:
    assert Extracting(RewardTerm(name=name, options=options)).prepare()(attempt(response)) == answer


def test_a_class_of_ones_own_reads_answers_and_a_function_does_not(own: Path) -> None:
    assert Extracting(RewardTerm(name=f"{own}:Whole")).prepare()(attempt("yes")) == "y"
    for name in (f"{own}:Bare", f"{own}:function", "length"):
        options = {"max_tokens": 4, "cache_tokens": 4} if name == "length" else {}
        with pytest.raises(RewardError, match="does not say which answer a response gives; a class derived from"):
            Extracting(RewardTerm(name=name, options=options)).prepare()


def test_answers_are_read_in_processes_of_their_own(own: Path) -> None:
    config = RewardConfig(parts={"mine": RewardTerm(name=f"{own}:Whole")})
    assert extracted(config, "mine", [attempt("yes"), attempt(""), attempt("no")]) == ["y", None, "n"]


@pytest.mark.parametrize(
    ("name", "per", "said"),
    [
        (
            "Bare",
            Per.ATTEMPT,
            r"own.py:Bare': the class must define score, which per=attempt calls; add `def sc",
        ),
        ("OfGroups", Per.ATTEMPT, "add `def score.*`, or set per: group, with which score_group is called"),
        ("Whole", Per.GROUP, "must define score_group, .*or set per: attempt, with which score is called"),
        ("WithoutSettings", Per.ATTEMPT, "the class WithoutSettings must define __init__; add `def __init__"),
        ("NoReward", Per.ATTEMPT, "the class NoReward must be derived from Reward .*; a function needs no class"),
    ],
)
def test_a_class_that_could_never_score_is_refused(own: Path, name: str, per: Per, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        Scoring({"mine": RewardTerm(name=f"{own}:{name}", per=per)}).prepare()


def test_a_class_with_its_method_is_not_refused(own: Path) -> None:
    parts = {"one": RewardTerm(name=f"{own}:Whole"), "all": RewardTerm(name=f"{own}:OfGroups", per=Per.GROUP)}
    Scoring(parts).prepare()
