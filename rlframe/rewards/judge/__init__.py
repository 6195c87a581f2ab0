"""A language model as judge: it reads an attempt and says a score, or compares the attempts of a group two by two.

What is judged is the policy's text, which may try to talk the judge into a score. Only the judge's own reply is read,
and its last verdict counts.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import permutations
from typing import Annotated

from rlframe.rewards.base import Attempt, Judging, Scores, Unanswered, begin
from rlframe.rewards.config import Per
from rlframe.rewards.judge.chat import Chat, ChatEndpoint, ChatEndpointConfig, NoReply
from rlframe.rewards.judge.question import UNPARSABLE, QuestionConfig, check_template, shown
from rlframe.rewards.judge.reading import Unreadable, last_choice, read, without_thoughts
from rlframe.utils.bounds import Range
from rlframe.utils.faults import Fault

FIRST, SECOND, TIE = "A", "B", "C"
"""The judge's words about two responses."""
WINS = {FIRST: 1.0, SECOND: 0.0, TIE: 0.5}
"""Points of the first response of a comparison."""
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
OF_PAIR = ("question", "answer", "first", "second", "first_conversation", "second_conversation")
"""Places of a template that show two attempts."""


@dataclass(kw_only=True, slots=True)
class JudgeConfig(QuestionConfig):
    """Settings of a judge."""

    endpoint: ChatEndpointConfig
    """The server of the judge's model."""
    pair_template: str = PAIR_TEMPLATE
    """Question to the judge about two attempts, {first} and {second}; it says A, B, or C if they are equal. Also
    {question}, {answer}, {first_conversation} and {second_conversation}. Each pair of a group is compared twice, once
    in each order, so that a judge that prefers a place gives both the same. An attempt's score is the share of
    comparisons that it wins, ties counting a half. With per=group."""
    concurrency: Annotated[int, Range(1, 4096)] = 16
    """Greatest number of questions at a time."""

    def __post_init__(self) -> None:
        QuestionConfig.__post_init__(self)
        check_template("pair_template", self.pair_template, OF_PAIR)


class Judge(Judging):
    """Asks a language model."""

    per = frozenset(Per)
    # Questions about a group wait for those about the groups before.
    begins = True

    @classmethod
    def faults(cls, config: JudgeConfig) -> Iterator[Fault]:
        """Yields a fault if the package that speaks HTTP is missing, or the variable with the key is not set here,
        where the run starts."""
        if find_spec("aiohttp") is None:
            yield Fault("endpoint", "needs the package aiohttp", hint="pip install 'rlframe[agents]'")
        name = config.endpoint.api_key_variable
        if name and not os.environ.get(name):
            yield Fault("endpoint.api_key_variable", "must name an environment variable that is set", got=name)

    def __init__(self, config: JudgeConfig, chat: Chat | None = None):
        """
        Args:
            chat: the judge's model. None is that of the endpoint.
        """
        self._config = config
        self._chat = chat or ChatEndpoint(config.endpoint)
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
        instead = self._config.instead()
        return Unanswered(str(trouble), why, scores=instead and instead * len(attempts))

    async def close(self) -> None:
        """See Judging."""
        await self._chat.close()

    async def _scored(self, attempts: Sequence[Attempt]) -> Sequence[Scores]:
        (attempt,) = attempts
        return [read(await self._said(self._config.template, shown(attempt)), self._config.reading)]

    async def _compared(self, attempts: Sequence[Attempt]) -> Sequence[Scores]:
        """Returns the share of comparisons that each attempt wins. One alone is not compared, and gets None."""
        if len(attempts) < 2:
            return [None] * len(attempts)
        places = [shown(attempt) for attempt in attempts]
        pairs = list(permutations(range(len(attempts)), 2))
        asked = [asyncio.ensure_future(self._wins(places[first], places[second])) for first, second in pairs]
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
        said = without_thoughts(await self._said(self._config.pair_template, places))
        return WINS[last_choice(said, WINS)]

    async def _said(self, template: str, places: Mapping[str, str]) -> str:
        """Returns the judge's reply to a template with its places filled in."""
        question = self._config.conversation(template, places)
        async with self._asking:
            begin()
            return await self._chat.say(question)


COMPONENT, CONFIG = Judge, JudgeConfig
