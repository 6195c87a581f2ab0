"""Questions to a judge about an attempt, and what becomes of attempts about which it gives no score."""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from rlframe.rewards.base import Attempt, Score
from rlframe.rewards.config import LARGEST_SCORE
from rlframe.rewards.judge.reading import ReadingConfig
from rlframe.types.messages import Message
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import RewardError, SettingError

UNPARSABLE = "unparsable"
"""Trouble of a reply without a verdict."""
TEMPLATE = """\
Judge how well the response answers the question.

[Question]
{question}

[Reference answer]
{answer}

[Response]
{response}

Give a short reason, then a last line of the form "Score: N" with N from 0 to 10."""
OF_ATTEMPT = ("question", "response", "answer", "conversation")
"""Places of a template that show an attempt."""


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
class QuestionConfig:
    """Settings of the question about one attempt, and of its answer."""

    template: str = TEMPLATE
    """Question to the judge about an attempt. {question} is the last message of the prompt, {response} the policy's
    last response, {answer} the reference answer, {conversation} everything that was said, with calls of tools; {{ and
    }} are brackets. With per=attempt."""
    system: str = ""
    """Message of the system before the question. Empty sends none."""
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    """Rule by which the reply becomes a number. With per=attempt."""
    without_score: WithoutScore = WithoutScore.FAIL
    """Fate of attempts without a score."""
    value_without_score: Annotated[float, Range(-LARGEST_SCORE, LARGEST_SCORE)] = 0.0
    """Score of attempts without one. Only with without_score=value."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_template("template", self.template, OF_ATTEMPT)
        if self.without_score is not WithoutScore.VALUE and self.value_without_score:
            raise SettingError(
                "value_without_score",
                f"has no effect with without_score={self.without_score}",
                got=self.value_without_score,
                hint="remove it",
            )

    def instead(self) -> list[Score] | None:
        """Returns the score of an attempt without one, in a list. None makes it a failure."""
        found = {WithoutScore.SKIP: [None], WithoutScore.VALUE: [self.value_without_score]}
        return found.get(self.without_score)

    def conversation(self, template: str, places: Mapping[str, str]) -> list[Message]:
        """Returns the question with the places of its template filled in.

        Raises:
            RewardError: it shows the answer, and the record has none.
        """
        if "answer" in _places(template) and not places["answer"]:
            raise RewardError("the record has no answer; name its field with data.answer_key, or change the template")
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        # What fills a place is not looked at again, whatever brackets it has.
        return [*system, {"role": "user", "content": template.format_map(places)}]


def shown(attempt: Attempt) -> dict[str, str]:
    """Returns what fills the places of a template."""
    spoken = [place for place, message in enumerate(attempt.messages) if message["role"] == "assistant"]
    # Of an agent's conversations the messages are the last one, which may have fewer turns than the attempt.
    turns = min(attempt.num_turns, len(spoken))
    first = spoken[-turns] if turns else len(attempt.messages)
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


def check_template(name: str, template: str, places: Sequence[str]) -> None:
    """Raises SettingError if a template has other places than these."""
    try:
        found = _places(template)
    except ValueError as error:
        raise SettingError(name, "must have {{ and }} for brackets that are no places", why=str(error)) from error
    if unknown := sorted(found - set(places)):
        raise SettingError(name, f"must have only the places {', '.join(places)}", got=", ".join(map(repr, unknown)))


def _places(template: str) -> set[str]:
    """Returns the places of a template. Raises ValueError for brackets that are no places and not doubled."""
    return {place for _, place, _, _ in string.Formatter().parse(template) if place is not None}
