"""From a record of any known shape to a conversation and the answer it is judged by.

| shape | prompt | assistant's words | answer |
|---|---|---|---|
| GSM8K {question, answer} | question | answer | the number after `####` |
| {prompt, answer} | prompt | answer | answer |
| {prompt, response} or {prompt, completion} | prompt | response | answer, else response |
| TRL {prompt: [{role, ...}], completion: [{role, ...}]} | prompt | of completion | answer, else the last turn |
| verl {prompt: [{role, content}], reward_model: {ground_truth}} | prompt | none | ground_truth |
| {messages: [{role, content}]} | up to the last assistant turn | its turns | answer, else the last turn |
| sharegpt {conversations: [{from, value}], system} | the same | the same | the same |
| alpaca {instruction, input, output, system, history} | instruction and input | output | output |
| OpenOrca {system_prompt, question, response} | question | response | response |

A message's `content` is text, or parts {type: text, text}, which are joined. Reasoning is read by
`rlframe.data.text.reasoning`, tools and calls of them by `rlframe.data.text.tool_calls`. Results of tools are not
learned.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlframe.data.config import DataConfig
from rlframe.data.records import Record, is_number
from rlframe.data.text.reasoning import KEYS as REASONING_KEYS
from rlframe.data.text.reasoning import reasoning_of
from rlframe.data.text.tool_calls import NONE, Tool, calls_of, tools_of
from rlframe.types.messages import Message
from rlframe.utils.errors import DataError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
PROMPT_KEYS = ("messages", "conversations", "instruction", "question", "prompt")
LISTS = ("messages", "conversations")
"""Keys of the prompt that hold no text, unless data.prompt_key names them."""
SYSTEM_KEYS = ("system", "system_prompt")
"""Keys of a system message beside a conversation."""
RESPONSE_KEYS = ("response", "completion", "output", "answer")
EXACT = 2**53
"""Size from which on doubles are no longer all whole numbers."""
OF_MESSAGES = ("completion", "response")
"""Fields of the response that may hold a list of messages."""
PARTS = ("context", "choices", "options", "input", "history")
"""Keys of a part of the prompt beside its text."""
OF_INSTRUCTION = ("input", "history")
"""Keys of parts that an instruction's prompt has in it."""
WEIGHT_KEYS = ("weight", "train", "loss")
"""Keys of a message's weight. The second is axolotl's, the third ms-swift's; both say true or false."""
UNREAD_WEIGHT_KEYS = ("loss_scale", "train_detail")
"""Keys with which ms-swift's and axolotl's messages weigh a part of their text."""
KWARGS_KEY = "chat_template_kwargs"
UNREAD_KEYS = tuple(
    f"{kind}{end}" for kind in ("image", "video", "audio") for end in ("s", "", "_path", "_paths", "_url")
)
"""Fields of what is no text."""
FINAL_ANSWER = re.compile(r"####\s*(-?[\d.,]+)\s*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A record, parsed as a conversation."""

    record: Record
    id: str
    messages: tuple[Message, ...]
    """All turns, the system message included."""
    weights: tuple[float, ...]
    """One per message: weight of its tokens relative to the others', if it is the assistant's. 0 where it is not
    learned."""
    prompt: tuple[Message, ...]
    """The turns before a completion that is a list of messages; otherwise those before the last turn if it is the
    assistant's, or all turns."""
    answer: str | None
    """Answer that a reward compares with. None if the record has none."""
    tools: tuple[Tool, ...] = ()
    """Tools that the assistant may call."""

    @property
    def prompt_text(self) -> str:
        """The prompt's turns as one text, for comparisons, with the record's task."""
        return text_of(self.prompt) + (f"\x00{self.record.task}" if self.record.task else "")


def text_of(messages: Sequence[Message]) -> str:
    """Returns turns as one text, for comparisons: equal for equal turns only."""
    return "\x00".join(
        f"{message['role']}\x00{message['content']}"
        + (f"\x00{message['reasoning_content']}\x00" if "reasoning_content" in message else "")
        + (json.dumps(message["tool_calls"], sort_keys=True) if "tool_calls" in message else "")
        for message in messages
    )


def understand(record: Record, config: DataConfig) -> Conversation:
    """Returns the conversation in `record`.

    Raises:
        DataError: the record has no known shape, lacks a field, has a wrong type, or has media, which are not
            supported.
    """
    messages, weights, asked = turns_of(record, config)
    answer = _answer(record, config.answer_key)
    if answer is None and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        answer = messages[-1]["content"]
    conversation = Conversation(
        record=record,
        id=record.id,
        messages=tuple(messages),
        weights=tuple(weights),
        prompt=tuple(messages[:asked]),
        answer=None if answer is None else final_answer(answer),
        tools=tools_of(record),
    )
    if not conversation.prompt or conversation.prompt[-1]["role"] not in ("user", "tool"):
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"{record.where}: expected a message from the user to answer, found turns of {roles}")
    return conversation


def turns_of(record: Record, config: DataConfig) -> tuple[list[Message], list[float], int]:
    """Returns the turns of prompt and response, the weight of each, and the number of turns of the prompt. Raises
    DataError as `understand`."""
    messages = prompt_messages(record, config)
    prompt_key = config.prompt_key or record.first(PROMPT_KEYS) or ""
    said = _said_weights(record, prompt_key, len(messages))
    response_key = config.answer_key or record.first(RESPONSE_KEYS)
    if response_key in OF_MESSAGES and isinstance(turns := record.fields.get(response_key), list):
        more = _completion(record, response_key, turns, messages)
        said += _weights_of(record, response_key, turns)
        return [*messages, *more], _weights(said, config, asked=len(messages)), len(messages)
    response = _text(record, response_key) if response_key else None
    if response is not None and messages[-1]["role"] != "assistant":
        is_prompt = response_key in OF_MESSAGES or prompt_key == "prompt"
        weights = _weights([*said, None], config, asked=len(messages) if is_prompt else 0)
        return [*messages, {"role": "assistant", "content": response}], weights, len(messages)
    if response and response_key in OF_MESSAGES and prompt_key == "prompt":
        raise _continued(record, response_key, "text", "its text")
    return messages, _weights(said, config, asked=0), len(messages) - (messages[-1]["role"] == "assistant")


def check_unweighted(record: Record) -> None:
    """Raises DataError if a record that is to be learned says how much it counts as a whole, which is not read."""
    weight = record.fields.get("weight")
    if is_number(weight) and weight != 1:
        raise DataError(
            f"{record.where}: expected no weight of a whole record, which rlframe does not read, found the field "
            f"'weight' {weight!r:.60}; give it to messages, or give datasets weights (data.path), or remove the field"
        )


def check_whole(record: Record, config: DataConfig) -> None:
    """Raises DataError if reasoning, or a list of responses, stands beside a response of text and would be left out of
    what is learned, unless data.answer_key names the response."""
    key = record.first(RESPONSE_KEYS)
    response = record.fields.get(key) if key else None
    if config.answer_key or not isinstance(response, str):
        return
    if isinstance(others := record.fields.get("responses"), list) and others:
        raise DataError(
            f"{record.where}: expected one response, found {key!r} beside 'responses', a list of {len(others)} that "
            f"would be left out; write a record for each response that is to be learned, or, if {key!r} is, name it "
            f"with {_setting('answer_key')}"
        )
    for name in REASONING_KEYS:
        value = record.fields.get(name)
        if isinstance(value, str) and value.strip() and value.strip() not in response:
            raise DataError(
                f"{record.where}: expected the whole response in {key!r}, found {name!r} beside it, which would be "
                f"left out: {value!r:.60}; give it as 'reasoning_content' of a message, write it into {key!r}, or, if "
                f"it is no part of the response, name the field with {_setting('answer_key')}"
            )


def check_learnt(conversation: Conversation, config: DataConfig) -> None:
    """Raises DataError if the record has a response of text that is not what its last turn says, and that would be left
    out of what is learned."""
    record = conversation.record
    key = config.answer_key or record.first(OF_MESSAGES)
    response = record.fields.get(key) if key else None
    if not isinstance(response, str) or response.strip() in conversation.messages[-1]["content"]:
        return
    raise DataError(
        f"{record.where}: expected one response, found that the conversation ends with the assistant's and that "
        f"{key!r} says another: {response!r:.60}; remove the last turn or the field"
        + (", or unset data.answer_key" if config.answer_key else "")
    )


def final_answer(text: str) -> str:
    """Returns the number after a closing `####`, without commas, as GSM8K marks it; any other text as it is.

    Source: https://github.com/openai/grade-school-math, `grade_school_math/dataset.py`.
    """
    match = FINAL_ANSWER.search(text)
    return match[1].replace(",", "") if match else text


def prompt_messages(record: Record, config: DataConfig) -> list[Message]:
    """Returns the turns under the prompt's field, behind the system message of the record or of the settings.

    Raises:
        DataError: the record has no known shape, a wrong type, or media, which are not supported.
    """
    return with_system(record, config, _messages_of_record(record, config.prompt_key))


def with_system(record: Record, config: DataConfig, messages: Sequence[Message]) -> list[Message]:
    """Returns the turns, behind the system message of the record or of the settings if they have none. Raises DataError
    if the record has media, or keyword arguments of the chat template that other records have not."""
    check_text_alone(record)
    _check_kwargs(record, config)
    own = (record.fields.get(key) for key in SYSTEM_KEYS)
    system = next((text for text in own if isinstance(text, str) and text), config.system_prompt)
    if system is None or messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def check_text_alone(record: Record) -> None:
    """Raises DataError if the record has media."""
    for key in UNREAD_KEYS:
        if record.fields.get(key) not in NONE:
            raise DataError(
                f"{record.where}: expected text alone, found {key!r}, which rlframe does not read; remove the field if "
                "the text says everything"
            )


def _check_kwargs(record: Record, config: DataConfig) -> None:
    """Raises DataError if the record has keyword arguments of the chat template, as TRL's may, other than those of all
    records."""
    given = record.fields.get(KWARGS_KEY)
    if not isinstance(given, dict):
        return
    common = config.chat_template_kwargs or {}
    # A file with columns gives each record the names of all.
    if own := {name: value for name, value in given.items() if value not in NONE and common.get(name) != value}:
        raise DataError(
            f"{record.where}: expected {KWARGS_KEY!r} to be those of data.{KWARGS_KEY}, which all records have, found "
            f"{own!r:.80} besides; set them there, or remove the field"
        )


def _completion(record: Record, key: str, turns: list[Any], prompt: Sequence[Message]) -> list[Message]:
    """Returns the turns of a completion that is a list of messages."""
    found = message_list(record, key, turns)
    if not found or found[0]["role"] != "assistant":
        begins = f"one from {found[0]['role']!r}" if found else "none"
        raise DataError(
            f"{record.where}: expected the messages of {key!r} to begin with the assistant's, found {begins}; put "
            "messages before it into the prompt"
        )
    if prompt[-1]["role"] == "assistant":
        raise _continued(record, key, "a list of messages", f"{key}[0]")
    return found


def _continued(record: Record, key: str, kind: str, into: str) -> DataError:
    """Returns the error of a response that continues the assistant's turn of its prompt."""
    return DataError(
        f"{record.where}: expected the prompt to end with the user or a tool where {key!r} is {kind}, found that both "
        f"are of the assistant; put the beginning of the response into {into}"
    )


def _weights(said: Sequence[float | None], config: DataConfig, *, asked: int) -> list[float]:
    """Returns the weight of each turn: its own if it says one, else 1 where it is learned and 0 elsewhere.

    Args:
        said: the weights that turns say.
        asked: number of turns of a prompt that stands apart from its response. As in TRL, they are not learned.
    """
    first = len(said) - 1 if config.last_turn_only else asked
    return [float(index >= first) if own is None else own for index, own in enumerate(said)]


def _said_weights(record: Record, key: str, count: int) -> list[float | None]:
    """Returns the weights that the last of `count` turns, which stand in the field `key`, say."""
    value = record.fields.get(key)
    own = _weights_of(record, key, value) if isinstance(value, list) else []
    # A system message from elsewhere stands before them.
    return [None] * (count - len(own)) + own


def _weights_of(record: Record, key: str, turns: list[Any]) -> list[float | None]:
    """Returns the weights that the messages in the list at the field `key` say."""
    weights: list[float | None] = [None] * len(turns)
    for index, turn in enumerate(turns):
        if unread := next((name for name in UNREAD_WEIGHT_KEYS if turn.get(name) not in NONE), None):
            raise DataError(
                f"{record.where}: expected {key}[{index}] to say its weight as 'weight', found {unread!r}, which "
                "rlframe does not read"
            )
        name = next((name for name in WEIGHT_KEYS if turn.get(name) is not None), None)
        if name is None:
            continue
        weight = turn[name]
        if isinstance(weight, bool) and name != "weight":
            weight = int(weight)
        where = f"{record.where}: expected {key}[{index}].{name}"
        if not is_number(weight) or weight < 0:
            raise DataError(f"{where} to be a number of at least 0, found {weight!r:.60}")
        if weight and ROLES[turn.get("role", turn.get("from"))] != "assistant":
            raise DataError(f"{where} to be on a message of the assistant, who alone is learnt, found {weight}")
        weights[index] = float(weight)
    return weights


def _setting(key: str) -> str:
    """Returns the setting that names a field. The records may be those of a set, which may have its own."""
    return f"data.{key}, or evaluation.sets.NAME.{key} of a set"


def _messages_of_record(record: Record, prompt_key: str | None) -> list[Message]:
    fields = record.fields
    key = prompt_key or record.first(PROMPT_KEYS)
    if key is None:
        raise DataError(
            f"{record.where}: expected one of the fields {', '.join(PROMPT_KEYS)}, "
            f"found {record.names}; name the field with {_setting('prompt_key')}"
        )
    if key not in fields:
        raise DataError(f"{record.where}: expected the field {key!r} ({_setting('prompt_key')}), found {record.names}")
    value = fields[key]
    if isinstance(value, list) and value:
        return message_list(record, key, value)
    if isinstance(value, str) and key in LISTS and prompt_key is None:
        raise DataError(
            f"{record.where}: expected {key!r} to be a list of messages, found text {value!r:.60}; if it is JSON, "
            f"write what it says in its place; if it is the prompt, name the field with {_setting('prompt_key')}"
        )
    if isinstance(value, str) and value.strip():
        messages = _alpaca(record) if key == "instruction" else [{"role": "user", "content": value}]
        if prompt_key is None:
            _check_parts(record, key, value)
        return messages
    raise DataError(
        f"{record.where}: expected {key!r} to be text or a list of messages, found {type(value).__name__} {value!r:.60}"
    )


def _check_parts(record: Record, key: str, prompt: str) -> None:
    """Raises DataError if a part of the prompt stands beside its text, in the field `key`, and would be left out."""
    for name in PARTS:
        value = record.fields.get(name)
        if key == "instruction" and name in OF_INSTRUCTION:
            continue
        if any(text.strip() not in prompt for text in _texts_in(value)):
            raise DataError(
                f"{record.where}: expected the whole prompt in {key!r}, found {name!r} beside it, which would be left "
                f"out: {value!r:.60}; write it into {key!r}, or, if it is no part of the prompt, name the field with "
                f"{_setting('prompt_key')}"
            )


def _texts_in(value: Any) -> Iterator[str]:
    """Yields every text in a value, but for the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(inner)


def message_list(record: Record, key: str, turns: list[Any]) -> list[Message]:
    """Returns the turns in the list at the field `key`."""
    return [message(record, f"{key}[{index}]", turn) for index, turn in enumerate(turns)]


def message(record: Record, name: str, turn: Any) -> Message:
    """Returns the turn that the field `name` is."""
    tag = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    if isinstance(tag, str) and tag in ROLES:
        role, calls = ROLES[tag], turn.get("tool_calls")
        content = _text_of_content(record, f"{name}.content", turn.get("content", turn.get("value")))
        reasoning = reasoning_of(record, name, turn, role=role)
        if tag == "function_call":
            return {"role": role, "content": "", **reasoning, "tool_calls": calls_of(record, name, content)}
        if calls and role == "assistant" and (content is None or isinstance(content, str)):
            made = calls_of(record, f"{name}.tool_calls", calls)
            return {"role": role, "content": content or "", **reasoning, "tool_calls": made}
        if isinstance(content, str) and not calls:
            of_tools = ("name", "tool_call_id") if role == "tool" else ()
            return {"role": role, "content": content, **reasoning} | {
                key: turn[key] for key in of_tools if isinstance(turn.get(key), str)
            }
    raise DataError(
        f"{record.where}: expected {name} to be {{role, content}} or {{from, value}} with text and a role of "
        f"{', '.join(ROLES)}, or an assistant's {{role, tool_calls}}, found {turn!r:.80}"
    )


def _text_of_content(record: Record, name: str, content: Any) -> Any:
    """Returns parts of type text as one text; anything that is no list of parts as it is.

    Raises:
        DataError: a part is of another type.
    """
    if not isinstance(content, list) or not content or not all(isinstance(part, dict) for part in content):
        return content
    for index, part in enumerate(content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{record.where}: expected {name}[{index}] to be {{type: text, text: ...}}, as rlframe reads no other "
                f"parts, found the type {part.get('type')!r:.40} in {part!r:.80}"
            )
    return "".join(part["text"] for part in content)


def _alpaca(record: Record) -> list[Message]:
    instruction, more = record.fields["instruction"], record.fields.get("input")
    messages = []
    history = record.fields.get("history") or []
    if not isinstance(history, list):
        raise DataError(f"{record.where}: expected 'history' to be a list, found {history!r:.60}")
    for pair in history:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise DataError(f"{record.where}: expected 'history' to hold [question, answer] pairs, found {pair!r:.60}")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    if more is not None and not isinstance(more, str):
        raise DataError(f"{record.where}: expected 'input' to be text, found {type(more).__name__} {more!r:.60}")
    return [*messages, {"role": "user", "content": f"{instruction}\n{more}" if more else instruction}]


def _answer(record: Record, answer_key: str | None) -> str | None:
    if answer_key:
        return _text(record, answer_key)
    judged = record.fields.get("reward_model")
    truth = judged.get("ground_truth") if isinstance(judged, dict) else None
    # Several answers, as Search-R1's records list them, are no answer: as text, a reward would compare with their list.
    if isinstance(truth, str | int | float):
        return truth if isinstance(truth, str) else _number(truth)
    key = "answer" if "answer" in record.fields else record.first(RESPONSE_KEYS)
    return _text(record, key) if key else None


def _text(record: Record, key: str) -> str | None:
    if key not in record.fields:
        raise DataError(f"{record.where}: expected the field {key!r} ({_setting('answer_key')}), found {record.names}")
    value = record.fields[key]
    if key in OF_MESSAGES and isinstance(value, list):
        # A completion of messages, whose last turn is the answer.
        return None
    if value is None or isinstance(value, str):
        return value
    if is_number(value):
        return _number(value)
    raise DataError(
        f"{record.where}: expected {key!r} to be text or a number, found {type(value).__name__} {value!r:.60}"
    )


def _number(value: float) -> str:
    """Returns a number as people write it: a whole one of a column of doubles is 5, not 5.0."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < EXACT
    return str(int(value) if is_whole else value)
