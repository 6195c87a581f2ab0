"""A judge in engines of the run: what its words add to rewards."""

import math
from dataclasses import replace
from typing import Any, cast

import pytest

from rlframe.loops.sampling.judging import EngineReplies, JudgeScorer, Reply, Scorers
from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.rewards.judge.question import QuestionConfig, WithoutScore
from rlframe.rewards.judge.reading import ReadingConfig, Unreadable, read
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, Rollout, SamplingParams
from rlframe.utils.errors import RlframeError
from tests.campaigns.rewards import rollout

REPLIES = {"good": Reply("Score: 8"), "odd": Reply("well"), "late": Reply(trouble="timed_out")}


def scored(*texts: str, reward: float = 0.5, weight: float = 2.0, **settings: Any) -> list[Rollout]:
    """Rollouts with a reward so far, after a judge that answers by their text."""

    def ask(questions: list[list[Message]]) -> list[Reply]:
        return [REPLIES[question[-1]["content"]] for question in questions]

    rollouts = [rollout(index, text, answer="x") for index, text in enumerate(texts)]
    for one in rollouts:
        one.reward, one.reward_parts, one.reward_weights = reward, {"other": reward}, {"other": 1.0}
    config = QuestionConfig(template="{response}", **settings)
    JudgeScorer(ask=ask, config=config, weight=weight).score(rollouts)
    return rollouts


def test_its_score_is_added_with_its_weight() -> None:
    (one,) = scored("good")
    assert one.reward == 0.5 + 2.0 * 0.8 and one.reward_parts == {"other": 0.5, "judge_model": 0.8}
    assert one.reward_weights == {"other": 1.0, "judge_model": 2.0} and not one.reward_failed
    assert not one.reward_troubles


def test_it_scores_what_no_function_has_scored() -> None:
    (one,) = scored("good", reward=math.nan)
    assert one.reward == 1.6
    (unscored,) = scored("good", reward=math.nan, weight=0.0)
    assert math.isnan(unscored.reward) and unscored.reward_parts["judge_model"] == 0.8


@pytest.mark.parametrize(
    ("settings", "reward", "part", "failed"),
    [
        ({}, 0.5, 0.0, True),
        ({"without_score": WithoutScore.SKIP}, 0.5, None, False),
        ({"without_score": WithoutScore.VALUE, "value_without_score": -1.0}, -1.5, -1.0, False),
    ],
)
@pytest.mark.parametrize(("text", "trouble"), [("odd", "unparsable"), ("late", "timed_out")])
def test_what_has_no_score_is_counted_and_handled_as_it_says(
    text: str, trouble: str, settings: dict[str, Any], reward: float, part: float | None, failed: bool
) -> None:
    bad, good = scored(text, "good", **settings)
    assert bad.reward == reward and bad.reward_parts.get("judge_model") == part and bad.reward_failed is failed
    assert bad.reward_troubles == {"judge_model": trouble} and good.reward == 2.1


@pytest.mark.parametrize(("weight", "paid", "reward"), [(2.0, False, math.nan), (0.0, False, 0.0), (2.0, True, 0.0)])
def test_an_attempt_that_the_only_judge_skips_has_the_environments_reward_or_none(
    weight: float, paid: bool, reward: float
) -> None:
    one = rollout(0, "odd", answer="x")
    config = QuestionConfig(template="{response}", without_score=WithoutScore.SKIP)
    JudgeScorer(ask=lambda questions: [REPLIES["odd"]], config=config, weight=weight, paid=paid).score([one])
    assert one.reward == pytest.approx(reward, nan_ok=True) and not one.reward_failed


def test_a_question_that_needs_an_answer_fails_without_one() -> None:
    config = QuestionConfig(template="{answer}", without_score=WithoutScore.SKIP)
    one = rollout(0, "good")
    one.prompt = replace(one.prompt, answer=None)
    JudgeScorer(ask=lambda questions: [], config=config, weight=1.0).score([one])
    assert one.reward_failed and one.reward_troubles == {"judge_model": "failed"}


def test_what_a_judge_says_without_a_verdict_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    scored("odd", "late", "odd", "odd", "good")
    assert [record.getMessage() for record in caplog.records] == [
        "the judge gave no score on prompt 0 (unparsable): no number in 'well'",
        "the judge gave no score on prompt 1 (timed_out): there was no reply in time",
        "the judge gave no score on prompt 2 (unparsable): no number in 'well'",
    ]


@pytest.mark.parametrize("without", [WithoutScore.FAIL, WithoutScore.SKIP])
def test_a_judge_that_never_scores_ends_the_run(without: WithoutScore) -> None:
    with pytest.raises(
        RlframeError, match=r"to any of the first 64 rollouts.*\(unparsable\): no number in 'well'; look"
    ):
        scored(*["odd"] * 64, without_score=without)
    scored("good", *["odd"] * 64)


def test_scorers_add_up() -> None:
    judge = JudgeScorer(ask=lambda questions: [Reply("Score: 5")], config=QuestionConfig(), weight=1.0)
    one = rollout(0, "good")
    one.reward = 0.0
    Scorers(scorers=[judge, replace(judge, weight=2.0)]).score([one])
    assert one.reward == 1.5


class Engines:
    """Attempts of engines that give the same reply to each question."""

    def __init__(self, reply: str):
        self._reply = reply

    def generate(self, prompts: list[Prompt], **named: Any) -> list[Group]:
        return [Group(id=each.id, prompt=each, rollouts=[rollout(0, self._reply)]) for each in prompts]


@pytest.mark.parametrize(
    ("opening", "reply", "score"),
    [
        ("<think>\n", "Score: 3 would do, but", None),
        ("<think>\n", "Score: 3 would do, but no.</think>\nScore: 8", 0.8),
        ("<think>\n\n</think>\n\n", "Score: 3", 0.3),
        ("", "Score: 3", 0.3),
    ],
)
def test_thoughts_that_the_judges_template_has_begun_are_thoughts(
    opening: str, reply: str, score: float | None
) -> None:
    words = tokenizer.load(resolve(ModelConfig(path="qwen3_moe_tiny_tools")))
    words.chat_template = f"{{{{ messages[0].content }}}}<|end|><|assistant|>{{{{ {opening!r} }}}}"
    ask = EngineReplies(
        attempts=cast(Any, Engines(reply)), tokenizer=words, sampling=SamplingParams(), max_positions=1024
    )
    (said,) = ask([[{"role": "user", "content": "good?"}]])
    if score is None:
        with pytest.raises(Unreadable):
            read(said.text, ReadingConfig())
    else:
        assert read(said.text, ReadingConfig()) == score
