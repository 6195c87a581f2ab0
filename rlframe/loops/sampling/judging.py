"""Scoring by a judge in engines of the run, whose score is added to the other rewards."""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlframe.attempts.fleet import Attempts
from rlframe.data.config import DataConfig
from rlframe.data.text.chat import encode, render
from rlframe.loops.sampling.scoring import Scorer
from rlframe.rewards.config import JUDGE_PART
from rlframe.rewards.judge.question import UNPARSABLE, QuestionConfig, shown
from rlframe.rewards.judge.reading import BEGIN_THOUGHTS, Unreadable, read
from rlframe.rewards.runner import TRIED_AT_LEAST, attempt_of
from rlframe.types.input import ModelInput
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Rollout, SamplingParams, weighted_sum
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError, RewardError, RlframeError

logger = logging.getLogger(__name__)
TOO_LONG, TIMED_OUT, FAILED = "too_long", "timed_out", "failed"
"""Troubles of questions that the judge does not answer."""
REASONS = {TOO_LONG: "the question leaves no room for a reply", TIMED_OUT: "there was no reply in time"}


@dataclass(frozen=True, slots=True)
class Reply:
    """The judge's answer to one question."""

    text: str = ""
    trouble: str = ""
    """A word for why it said nothing. Empty if it spoke."""


@dataclass(kw_only=True)
class JudgeScorer:
    """Adds the score of a judge to the rewards of rollouts."""

    ask: Callable[[list[list[Message]]], list[Reply]]
    """Returns the judge's reply to each conversation."""
    config: QuestionConfig
    weight: float
    """Factor of the score in the sum. 0 only logs it."""
    paid: bool = False
    """Whether the environment gives each attempt a reward. One that nothing else has scored then has that."""
    _missing: Counter[str] = field(default_factory=Counter, init=False)
    """Number of rollouts without a score, by trouble."""
    _has_scored: bool = field(default=False, init=False)

    def score(self, rollouts: list[Rollout]) -> None:
        """Scores as Scorer does. What has no score is counted, and counts as the settings say.

        Raises:
            RlframeError: the judge has given no score since the run began, to TRIED_AT_LEAST rollouts or more.
        """
        template = self.config.template
        asked: list[Rollout] = []
        questions: list[list[Message]] = []
        for rollout in rollouts:
            try:
                questions.append(self.config.conversation(template, shown(attempt_of(rollout))))
                asked.append(rollout)
            except RewardError as error:  # The record has no answer: a failure, whatever is done without a score.
                _add(rollout, None, FAILED, weight=self.weight, is_failure=True)
                self._tell(rollout, FAILED, str(error))
        for rollout, reply in zip(asked, self.ask(questions), strict=True):
            self._judge(rollout, reply)

    def _judge(self, rollout: Rollout, reply: Reply) -> None:
        trouble, why = reply.trouble, REASONS.get(reply.trouble, "")
        if not trouble:
            try:
                _add(rollout, read(reply.text, self.config.reading), "", weight=self.weight)
                self._has_scored = True
                return
            except Unreadable as error:
                trouble, why = UNPARSABLE, str(error)
        instead = self.config.instead()
        score = instead[0] if instead else None
        _add(rollout, score, trouble, weight=self.weight, is_failure=instead is None)
        if self.paid and math.isnan(rollout.reward):
            rollout.reward = 0.0
        self._tell(rollout, trouble, why)

    def _tell(self, rollout: Rollout, trouble: str, why: str) -> None:
        """Logs that a rollout has no score, and ends a run whose judge cannot work, instead of training without it."""
        self._missing[trouble] += 1
        number = self._missing[trouble]
        if number & (number - 1) == 0:  # 1, 2, 4, ...
            logger.warning("the judge gave no score on prompt %s (%s): %s", rollout.prompt.id, trouble, why)
        if not self._has_scored and (tried := self._missing.total()) >= TRIED_AT_LEAST:
            # Nothing that is refused before a run.
            raise RlframeError(
                f"the judge has given no score to any of the first {tried} rollouts, so nothing can be learned from it "
                f"({trouble}): {why}; look at judge.template, judge.reading and judge.engine.max_tokens"
            )


def _add(rollout: Rollout, score: float | None, trouble: str, *, weight: float, is_failure: bool = False) -> None:
    """Adds a score to the reward of a rollout. A failure counts as 0."""
    rollout.reward_weights = {**rollout.reward_weights, JUDGE_PART: weight}
    if trouble:
        rollout.reward_troubles = {**rollout.reward_troubles, JUDGE_PART: trouble}
    rollout.reward_failed |= is_failure
    if score is None and not is_failure:
        if math.isnan(weighted_sum(rollout.reward_parts, rollout.reward_weights)):
            # The 0 of a rollout that nothing has scored is no reward.
            rollout.reward = math.nan
        return
    value = score or 0.0
    rollout.reward_parts = {**rollout.reward_parts, JUDGE_PART: value}
    if weight:
        rollout.reward = (0.0 if math.isnan(rollout.reward) else rollout.reward) + weight * value


@dataclass(kw_only=True)
class EngineReplies:
    """Asks a judge in engines of the run."""

    attempts: Attempts
    """Attempts of the judge's engines."""
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    max_positions: int
    """Greatest number of tokens of question and reply."""

    def __call__(self, questions: Sequence[Sequence[Message]]) -> list[Reply]:
        """Returns the judge's reply to each conversation."""
        prompts = {place: prompt for place, each in enumerate(questions) if (prompt := self._prompt(each))}
        replies = [Reply(trouble=TOO_LONG) for _ in questions]
        groups = self.attempts.generate(list(prompts.values()), group_size=1, step=0, sampling=self.sampling)
        for (place, prompt), group in zip(prompts.items(), groups, strict=True):
            # Where the template has begun the thoughts, the reply would not read as cut off in them.
            begun = BEGIN_THOUGHTS if prompt.text.rstrip().endswith(BEGIN_THOUGHTS) else ""
            replies[place] = Reply(begun + group.rollouts[0].text) if group.rollouts else Reply(trouble=TIMED_OUT)
        return replies

    def _prompt(self, question: Sequence[Message]) -> Prompt | None:
        """Returns the question as the judge reads it. None if it leaves no room for a reply."""
        rendered = render(
            self.tokenizer, question, config=DataConfig(), generation_prompt=True, where="the question to the judge"
        )
        try:
            (token_ids,) = encode(self.tokenizer, [rendered])
        except DataError:
            return None
        if len(token_ids) + self.sampling.max_tokens > self.max_positions:
            return None
        # The seed is that of the text, in every step, and of how often the same text was asked at once before.
        name = hashlib.sha256(rendered.text.encode(errors="replace")).hexdigest()[:16]
        return Prompt(id=name, text=rendered.text, input=ModelInput(np.array(token_ids)))


@dataclass(kw_only=True)
class Scorers:
    """Several scorers, one after the other."""

    scorers: Sequence[Scorer]

    def score(self, rollouts: list[Rollout]) -> None:
        """Scores as Scorer does."""
        for scorer in self.scorers:
            scorer.score(rollouts)
