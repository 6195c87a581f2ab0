"""Pairs of responses to one prompt, one preferred to the other: DPO and similar algorithms, reward models.

| shape | prompt | chosen and rejected |
|---|---|---|
| {prompt (or any of PROMPT_KEYS), chosen, rejected} | as in `conversations` | text, one message, or a list of them |
| {chosen, rejected} as whole conversations | the turns they have in common | the turns after them |
| {prompt (or ...), responses, scores} | as in `conversations` | every pair, by the higher score |
| {prompt (or ...), responses, ranks} | as in `conversations` | every pair, by the smaller rank |

The margin is `margin`, or `score_chosen - score_rejected`, or the difference of two `scores`; else 0. Responses that
are level make no pair.
"""

from dataclasses import dataclass
from typing import Any

import torch

from rlframe.data.config import TEMPLATE_SETTINGS, DataConfig
from rlframe.data.items import Item
from rlframe.data.records import Record, is_number
from rlframe.data.text.conversations import (
    PROMPT_KEYS,
    UNREAD_WEIGHT_KEYS,
    WEIGHT_KEYS,
    check_unweighted,
    message,
    message_list,
    prompt_messages,
    text_of,
    with_system,
)
from rlframe.data.text.tool_calls import NONE, Tool, tools_of
from rlframe.data.text.turns import Tokens, encode_turns
from rlframe.data.training import TrainingSource, packed
from rlframe.types.messages import Message
from rlframe.types.supervised import Preferences
from rlframe.utils.errors import DataError

Turns = tuple[Message, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A record, parsed."""

    record: Record
    id: str
    prompt: Turns
    responses: tuple[Turns, ...]
    """The responses. Each begins with the assistant."""
    pairs: tuple[tuple[int, int, float], ...]
    """Indices of a better and a worse response, and the margin."""
    tools: tuple[Tool, ...]
    """Tools that the assistant may call."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt and a response."""
        return (*self.prompt, *self.responses[0])

    @property
    def prompt_text(self) -> str:
        """The prompt's turns, for comparisons."""
        return text_of(self.prompt)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair(Item):
    """A pair, whose parts are the chosen and the rejected sequence."""

    margin: float


class PreferenceSource(TrainingSource[Pair]):
    """Pairs, two sequences each, learnt in the turns after the common prompt."""

    unit = "pair"
    item = Pair
    settings = TEMPLATE_SETTINGS | {"prompt_key", "system_prompt"}
    sequences_per_item = 2

    @staticmethod
    def understand(record: Record, config: DataConfig) -> Comparison:
        """Returns the prompt, its responses, and which of them is preferred to which."""
        check_unweighted(record)
        if record.has("responses"):
            prompt, responses, pairs = _ranked(record, config)
        else:
            prompt, responses = _chosen_and_rejected(record, config)
            pairs = [(0, 1, _margin(record))]
        if not prompt or prompt[-1]["role"] not in ("user", "tool"):
            roles = ", ".join(turn["role"] for turn in prompt) or "none"
            raise DataError(f"{record.where}: expected a prompt that ends with the user, found turns of {roles}")
        return Comparison(
            record=record,
            id=record.id,
            prompt=prompt,
            responses=tuple(responses),
            pairs=tuple(pairs),
            tools=tools_of(record),
        )

    def items(self, reading: Comparison, channel: int) -> list[Pair]:
        """Returns one for each pair whose responses are not the same."""
        if not reading.pairs:
            self.dropped["no response is preferred to another"] += 1
        encoded: dict[int, Tokens] = {}
        made: list[Pair] = []
        for better, worse, margin in reading.pairs:
            if text_of(reading.responses[better]) == text_of(reading.responses[worse]):
                self.dropped["chosen equals rejected"] += 1
                continue
            for index in (better, worse):
                if index not in encoded:
                    encoded[index] = self._response(reading, index)
            identity = reading.id if len(reading.responses) == 2 else f"{reading.id}#{better}>{worse}"
            made.append(Pair(id=identity, parts=(encoded[better], encoded[worse]), channel=channel, margin=margin))
        return made

    def titles(self, item: Pair) -> list[str]:
        """Returns which one is which, and by how much it is better."""
        return [f"chosen, margin {item.margin:g}", "rejected"]

    def batch(self, items: list[Pair]) -> Preferences:
        """Returns 2 * pairs sequences packed to T tokens: each pair's chosen one, then its rejected one."""
        index = torch.arange(len(items))
        return Preferences(
            **packed(items),
            pair=index.repeat_interleave(2),
            chosen=torch.tensor([True, False]).repeat(len(items)),
            margin=torch.tensor([item.margin for item in items], dtype=torch.float32).repeat_interleave(2),
        )

    def _response(self, reading: Comparison, index: int) -> Tokens:
        turns = reading.responses[index]
        weights = [0.0] * len(reading.prompt) + [float(turn["role"] == "assistant") for turn in turns]
        where = reading.record.where
        encoded = encode_turns(
            (*reading.prompt, *turns),
            weights,
            tokenizer=self.tokenizer,
            config=self.config,
            where=where,
            tools=reading.tools,
        )
        self.count(encoded)
        return encoded.single(where=where, what="each response of a pair")


def _chosen_and_rejected(record: Record, config: DataConfig) -> tuple[Turns, list[Turns]]:
    fields = record.fields
    if missing := [key for key in ("chosen", "rejected") if key not in fields]:
        raise DataError(
            f"{record.where}: expected 'chosen' and 'rejected', or 'responses' with 'scores' or 'ranks'; no "
            f"{' and no '.join(map(repr, missing))} among the fields {record.names}"
        )
    chosen, rejected = (_turns(record, key, fields[key]) for key in ("chosen", "rejected"))
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return _prompt(record, config), [chosen, rejected]
    common = next(
        (index for index, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)) - 1,
    )
    prompt, responses = chosen[:common], [chosen[common:], rejected[common:]]
    if not prompt or any(response[0]["role"] != "assistant" for response in responses):
        raise DataError(
            f"{record.where}: expected 'chosen' and 'rejected' to be whole conversations that differ from an "
            f"assistant's turn on, found that turn {common} is from {chosen[common]['role']!r} in one and "
            f"{rejected[common]['role']!r} in the other"
        )
    _check_prompt(record, config, prompt)
    return tuple(with_system(record, config, prompt)), responses


def _check_prompt(record: Record, config: DataConfig, common: Turns) -> None:
    """Raises DataError if the record has a prompt that is not what two whole conversations begin with."""
    key = config.prompt_key or "prompt"
    if config.prompt_key and key not in record.fields:
        raise DataError(f"{record.where}: expected the field {key!r} (data.prompt_key), found {record.names}")
    value = record.fields.get(key)
    said = [turn["content"].strip() for turn in common]
    if isinstance(value, list) and value:
        given = [turn["content"].strip() for turn in message_list(record, key, value)]
    else:
        given = [value.strip()] if isinstance(value, str) and value.strip() else []
    if given and said[-len(given) :] != given:
        raise DataError(
            f"{record.where}: expected 'chosen' and 'rejected' to begin with the assistant, or as whole conversations "
            f"with the turns of {key!r}, found another beginning, {said[-1]!r:.60}; remove {key!r}, or the turns "
            "before the responses"
        )


def _ranked(record: Record, config: DataConfig) -> tuple[Turns, list[Turns], list[tuple[int, int, float]]]:
    """Returns the prompt, the responses, and every pair of them that is not level, the better one first."""
    fields = record.fields
    key = record.first(("scores", "ranks"))
    values = fields["responses"]
    if not isinstance(values, list) or len(values) < 2:
        raise DataError(f"{record.where}: expected 'responses' to list at least 2, found {values!r:.60}")
    if key is None:
        raise DataError(f"{record.where}: expected 'scores' (highest best) or 'ranks' (1 best) beside 'responses'")
    grades = fields[key]
    if not isinstance(grades, list) or len(grades) != len(values):
        raise DataError(f"{record.where}: expected {key!r} to be a list of {len(values)} numbers, found {grades!r:.60}")
    numbers = [_number(record, f"{key}[{index}]", grade) for index, grade in enumerate(grades)]
    responses = [_turns(record, f"responses[{index}]", value) for index, value in enumerate(values)]
    if any(response[0]["role"] != "assistant" for response in responses):
        raise DataError(f"{record.where}: expected each of 'responses' to begin with the assistant")
    sign = 1.0 if key == "scores" else -1.0
    pairs = [
        (better, worse, numbers[better] - numbers[worse] if key == "scores" else 0.0)
        for better in range(len(numbers))
        for worse in range(len(numbers))
        if sign * numbers[better] > sign * numbers[worse]
    ]
    return _prompt(record, config), responses, pairs


def _prompt(record: Record, config: DataConfig) -> Turns:
    if config.prompt_key is None and not any(key in record.fields for key in PROMPT_KEYS):
        raise DataError(
            f"{record.where}: expected the prompt in one of the fields {', '.join(PROMPT_KEYS)}, or 'chosen' and "
            f"'rejected' as lists of messages that begin with it, found the fields {record.names}; name "
            "the field with data.prompt_key"
        )
    return tuple(prompt_messages(record, config))


def _turns(record: Record, key: str, value: Any) -> Turns:
    """Returns a response, or a whole conversation, as text, one message or a list of them."""
    for turn in value if isinstance(value, list) else [value]:
        fields = turn if isinstance(turn, dict) else {}
        said = [fields.get(name) for name in WEIGHT_KEYS]
        said += [fields.get(name) for name in UNREAD_WEIGHT_KEYS]
        if weights := [each for each in said if each not in NONE and each != 1]:
            raise DataError(
                f"{record.where}: expected no weight on a message of {key!r}, which counts as a whole, found "
                f"{weights[0]!r:.60}; remove it"
            )
    if isinstance(value, str) and value:
        return ({"role": "assistant", "content": value},)
    if isinstance(value, dict):
        return (message(record, key, value),)
    if isinstance(value, list) and value:
        return tuple(message_list(record, key, value))
    raise DataError(
        f"{record.where}: expected {key!r} to be text, a message or a list of messages, found "
        f"{type(value).__name__} {value!r:.60}"
    )


def _margin(record: Record) -> float:
    fields = record.fields
    if fields.get("margin") is not None:
        name, margin = "'margin'", _number(record, "margin", fields["margin"])
    elif fields.get("score_chosen") is not None and fields.get("score_rejected") is not None:
        name = "'score_chosen' - 'score_rejected'"
        chosen, rejected = (_number(record, key, fields[key]) for key in ("score_chosen", "score_rejected"))
        margin = chosen - rejected
    else:
        return 0.0
    if margin < 0:
        raise DataError(
            f"{record.where}: expected {name} to be at least 0, as the chosen one is better, found {margin}"
        )
    return margin


def _number(record: Record, key: str, value: Any) -> float:
    if not is_number(value):
        raise DataError(f"{record.where}: expected {key!r} to be a number, found {value!r:.60}")
    return float(value)


SOURCE = PreferenceSource
