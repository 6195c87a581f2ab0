"""A language model as judge: it reads an attempt and says a score, or compares the attempts of a group two by two.

What is judged is the policy's text, which may try to talk the judge into a score. Only the judge's own reply is read,
and its last verdict counts.
"""

import asyncio
import json
import os
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import permutations
from typing import Annotated

from rlframe.rewards.base import Attempt, Judging, Scores, Unanswered
from rlframe.rewards.config import LARGEST_SCORE, Per
from rlframe.rewards.judge.chat import Chat, Endpoint, EndpointConfig, NoReply
from rlframe.rewards.judge.reading import ReadingConfig, Unreadable, last_choice, read
from rlframe.types.messages import Message
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import RewardError, SettingError
from rlframe.utils.faults import Fault

UNPARSABLE = "unparsable"
"""Trouble of a reply without a verdict."""
FIRST, SECOND, TIE = "A", "B", "C"
"""The judge's words about two responses."""
WINS = {FIRST: 1.0, SECOND: 0.0, TIE: 0.5}
"""Points of the first response of a comparison."""
TEMPLATE = """\
Judge how well the response answers the question.

[Question]
{question}

[Reference answer]
{answer}

[Response]
{response}

Give a short reason, then a last line of the form "Score: N" with N from 0 to 10."""
PAIR_TEMPLATE = """\
Which response answers the question better?

[Question]
{question}

[Reference answer]
{answer}

[Response A]
{first}

[Response B]
{second}

Give a short reason, then a last line with one letter: A, B, or C if they are equally good."""
OF_ATTEMPT = ("question", "response", "answer", "conversation")
"""Places of a template that show an attempt."""
OF_PAIR = ("question", "answer", "first", "second", "first_conversation", "second_conversation")
"""Places of a template that show two attempts."""


class WithoutScore(StrEnum):
    """Fates of attempts about which the judge gives no score. All are counted in the metrics
    `reward/PART_REASON_fraction`, the reason being `unparsable`, `timed_out`, `unreachable` or `refused`."""

    FAIL = "fail"
    """The part counts as 0, and the rollout as failed, as with a reward function that raises."""
    SKIP = "skip"
    """The part is left out of the sum."""
    VALUE = "value"
    """The part counts as `value_without_score`."""


@dataclass(kw_only=True, slots=True)
class JudgeConfig:
    """Settings of a judge."""

    endpoint: EndpointConfig
    """The server of the judge's model."""
    template: str = TEMPLATE
    """Question to the judge about an attempt. {question} is the last message of the prompt, {response} the policy's
    last response, {answer} the reference answer, {conversation} everything that was said, with calls of tools; {{ and
    }} are brackets. With per=attempt."""
    pair_template: str = PAIR_TEMPLATE
    """Question to the judge about two attempts, {first} and {second}; it says A, B, or C if they are equal. Also
    {question}, {answer}, {first_conversation} and {second_conversation}. Each pair of a group is compared twice, once
    in each order, so that a judge that prefers a place gives both the same. An attempt's score is the share of
    comparisons that it wins, ties counting a half. With per=group."""
    system: str = ""
    """Message of the system before the question. Empty sends none."""
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    """Rule by which the reply becomes a number. With per=attempt."""
    without_score: WithoutScore = WithoutScore.FAIL
    """Fate of attempts without a score."""
    value_without_score: Annotated[float, Range(-LARGEST_SCORE, LARGEST_SCORE)] = 0.0
    """Score of attempts without one. Only with without_score=value."""
    concurrency: Annotated[int, Range(1, 4096)] = 16
    """Greatest number of questions at a time."""

    def __post_init__(self) -> None:
        check_bounds(self)
        _check_template("template", self.template, OF_ATTEMPT)
        _check_template("pair_template", self.pair_template, OF_PAIR)
        if self.without_score is not WithoutScore.VALUE and self.value_without_score:
            raise SettingError(
                "value_without_score",
                f"has no effect with without_score={self.without_score}",
                got=self.value_without_score,
                hint="remove it",
            )


class Judge(Judging):
    """Asks a language model."""

    per = frozenset(Per)

    @classmethod
    def faults(cls, config: JudgeConfig) -> Iterator[Fault]:
        """Yields a fault if the variable with the key is not set here, where the run starts."""
        name = config.endpoint.api_key_variable
        if name and not os.environ.get(name):
            yield Fault("endpoint.api_key_variable", "must name an environment variable that is set", got=name)

    def __init__(self, config: JudgeConfig, chat: Chat | None = None):
        """
        Args:
            chat: the judge's model. None is that of the endpoint.
        """
        self._config = config
        self._chat = chat or Endpoint(config.endpoint)
        self.at_once = config.concurrency
        self._asking = asyncio.Semaphore(config.concurrency)

    async def judge(self, attempts: Sequence[Attempt], per: Per) -> Sequence[Scores]:
        """See Judging."""
        try:
            return await (self._compared(attempts) if per is Per.GROUP else self._scored(attempts))
        except Unreadable as error:
            raise self.without(UNPARSABLE, str(error), attempts) from None
        except NoReply as error:
            raise self.without(error.reason, str(error), attempts) from None

    def without(self, trouble: str, why: str, attempts: Sequence[Attempt]) -> Unanswered:
        """See Judging."""
        instead = {
            WithoutScore.FAIL: None,
            WithoutScore.SKIP: [None] * len(attempts),
            WithoutScore.VALUE: [self._config.value_without_score] * len(attempts),
        }
        return Unanswered(str(trouble), why, scores=instead[self._config.without_score])

    async def close(self) -> None:
        """See Judging."""
        await self._chat.close()

    async def _scored(self, attempts: Sequence[Attempt]) -> Sequence[Scores]:
        (attempt,) = attempts
        return [read(await self._said(self._config.template, _shown(attempt)), self._config.reading)]

    async def _compared(self, attempts: Sequence[Attempt]) -> Sequence[Scores]:
        """Returns the share of comparisons that each attempt wins. One alone is not compared, and gets None."""
        if len(attempts) < 2:
            return [None] * len(attempts)
        shown = [_shown(attempt) for attempt in attempts]
        pairs = list(permutations(range(len(attempts)), 2))
        asked = [asyncio.ensure_future(self._wins(shown[first], shown[second])) for first, second in pairs]
        try:
            verdicts = await asyncio.gather(*asked)
        finally:
            # Where one has no verdict, the others are in vain.
            for each in asked:
                each.cancel()
        won = [0.0] * len(attempts)
        for (first, second), wins in zip(pairs, verdicts, strict=True):
            won[first] += wins
            won[second] += 1 - wins
        return [share / (2 * (len(attempts) - 1)) for share in won]

    async def _wins(self, first: Mapping[str, str], second: Mapping[str, str]) -> float:
        places = {
            **first,
            "first": first["response"],
            "second": second["response"],
            "first_conversation": first["conversation"],
            "second_conversation": second["conversation"],
        }
        return WINS[last_choice(await self._said(self._config.pair_template, places), WINS)]

    async def _said(self, template: str, places: Mapping[str, str]) -> str:
        """Returns the judge's reply to a template with its places filled in."""
        if "{answer}" in template and not places["answer"]:
            raise RewardError("the record has no answer; name its field with data.answer_key, or change the template")
        # What fills a place is not looked at again, whatever brackets it has.
        question = template.format_map(places)
        system: list[Message] = [{"role": "system", "content": self._config.system}] if self._config.system else []
        async with self._asking:
            return await self._chat.say([*system, {"role": "user", "content": question}])


def _shown(attempt: Attempt) -> dict[str, str]:
    """Returns what fills the places of a template."""
    spoken = [place for place, message in enumerate(attempt.messages) if message["role"] == "assistant"]
    first = spoken[-attempt.num_turns] if 0 < attempt.num_turns <= len(spoken) else len(attempt.messages)
    asked = [message["content"] for message in attempt.messages[:first] if message["role"] == "user"]
    return {
        "question": asked[-1] if asked else attempt.prompt_text,
        "response": attempt.response_text,
        "answer": attempt.answer or "",
        "conversation": "\n\n".join(_lines(attempt.messages)),
    }


def _lines(messages: Sequence[Message]) -> Iterator[str]:
    """Yields the messages as text, with calls of tools."""
    for message in messages:
        yield f"[{message['role']}]\n{message['content']}"
        for call in message.get("tool_calls", ()):
            yield f"[call of {call['function']['name']}]\n{json.dumps(call['function']['arguments'])}"


def _check_template(name: str, template: str, places: Sequence[str]) -> None:
    try:
        found = {place for _, place, _, _ in string.Formatter().parse(template) if place is not None}
    except ValueError as error:
        raise SettingError(name, "must have {{ and }} for brackets that are no places", why=str(error)) from error
    if unknown := sorted(found - set(places)):
        raise SettingError(name, f"must have only the places {', '.join(places)}", got=", ".join(map(repr, unknown)))


COMPONENT, CONFIG = Judge, JudgeConfig
