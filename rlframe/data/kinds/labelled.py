"""Sequences with a label each: classification and regression; and several texts for one query: rerankers.

| shape | sequences | labels |
|---|---|---|
| {text, label} | the text, begun as the tokenizer does, and its end token | a name, a class from 0, or a number |
| {messages (or any of PROMPT_KEYS), label} | the conversation to the end of its last turn | the same |
| {prompt (or ...), completion (or any of RESPONSE_KEYS), label} | the prompt and the response | the same |
| {query, documents, labels} | query, newline and document, for each document | numbers |
| {query, positive, negative(s)} | the same | 1 for the positive ones, 0 for the others |

Names become the numbers of their places in `data.labels`, or in the sorted list of all there are. That list is logged
and part of checkpoints.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlframe.data.config import TEMPLATE_SETTINGS, DataConfig
from rlframe.data.items import Item
from rlframe.data.kinds.contrasted import NEAR_KEYS, far_texts
from rlframe.data.records import Record, is_number
from rlframe.data.text.chat import encode, render
from rlframe.data.text.conversations import check_text_alone, text_of, turns_of
from rlframe.data.text.documents import encode_text, last_token_counts, text_field, text_list
from rlframe.data.text.reasoning import as_read, check_is_written, is_left_out
from rlframe.data.text.tool_calls import tools_of
from rlframe.data.text.turns import end_of_turn
from rlframe.data.training import LEFT_OUT, TrainingSource, packed
from rlframe.types.messages import Message
from rlframe.types.supervised import Labelled
from rlframe.utils.errors import DataError

Label = str | float


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelling:
    """A record, parsed."""

    record: Record
    texts: tuple[str, ...]
    """Labelled texts. Empty if `messages` is labelled."""
    messages: tuple[Message, ...]
    labels: tuple[Label, ...]
    """One label for each text, or for the messages."""
    prompt_text: str

    @property
    def id(self) -> str:
        """The id of the record."""
        return self.record.id


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LabelledItem(Item):
    """Sequences of one query, or a single sequence."""

    labels: tuple[float, ...]
    """One label for each part."""


class LabelledSource(TrainingSource[LabelledItem]):
    """Sequences whose last token is judged."""

    unit = "labelled record"
    item = LabelledItem
    settings = TEMPLATE_SETTINGS | {"prompt_key", "answer_key", "system_prompt", "labels"}
    labels: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers. Empty if labels are numbers."""

    @staticmethod
    def understand(record: Record, config: DataConfig) -> Labelling:
        """Returns the sequences and their labels."""
        check_text_alone(record)
        if record.has("query"):
            return _ranked(record)
        if "label" not in record.fields:
            raise DataError(
                f"{record.where}: expected 'label' beside a text, or 'query' with 'documents' and 'labels', found the "
                f"fields {record.names}"
            )
        labels = (_label(record, "label", record.fields["label"], config.labels),)
        if config.streaming and config.labels is None and isinstance(labels[0], str):
            raise DataError(
                f"{record.where}: expected data.labels to list the names of the classes, which cannot be gathered from "
                f"records yet to be read with data.streaming=true, found the name {labels[0]!r:.60}"
            )
        if record.has("text") and config.prompt_key is None:
            text = text_field(record, ("text",))
            return Labelling(record=record, texts=(text,), messages=(), labels=labels, prompt_text=text)
        messages, _, asked = turns_of(record, config)
        # Of two responses to one prompt none may be trained on while the other is held out.
        prompt_text = text_of(messages[:asked])
        return Labelling(record=record, texts=(), messages=tuple(messages), labels=labels, prompt_text=prompt_text)

    def notes(self, readings: Iterable[Labelling]) -> dict[str, Any]:
        """Returns the names of the classes in the order of their numbers."""
        names: set[str] = set()
        kinds: dict[bool, str] = {}
        for reading in readings:
            for label in reading.labels:
                kinds.setdefault(isinstance(label, str), reading.record.where)
                names |= {label} if isinstance(label, str) else set()
        if len(kinds) > 1:
            raise DataError(
                f"{self.config.what}: expected all labels to be names or all to be numbers, found both: a name in "
                f"{kinds[True]} and a number in {kinds[False]}"
            )
        return {"labels": self.config.labels or sorted(names)}

    def recall(self, notes: dict[str, Any]) -> None:
        """Assigns numbers to the names of the classes."""
        self.labels = tuple(notes["labels"])

    def classes(self) -> str:
        """Returns the classes with their numbers, for people."""
        return ", ".join(f"{number} {name}" for number, name in enumerate(self.labels))

    def items(self, reading: Labelling, channel: int) -> list[LabelledItem]:
        """Returns one."""
        if reading.messages:
            where, tools = reading.record.where, tools_of(reading.record)
            text = render(
                self.tokenizer,
                as_read(reading.messages, self.tokenizer, where=where),
                config=self.config,
                generation_prompt=False,
                where=where,
                tools=tools,
            )
            check_is_written(reading.messages[-1], text.text, text)
            if left_out := sum(is_left_out(message, text.text) for message in reading.messages[:-1]):
                self.counted[LEFT_OUT] += left_out
            (token_ids,) = encode(self.tokenizer, [text])
            if not token_ids:
                raise DataError(f"{where}: expected text to judge, found that the chat template writes none")
            parts = (last_token_counts(token_ids[: end_of_turn(token_ids, start=0, tokenizer=self.tokenizer)]),)
        else:
            where = reading.record.where
            parts = tuple(encode_text(text, self.tokenizer, config=self.config, where=where) for text in reading.texts)
        labels = tuple(float(self.labels.index(one) if isinstance(one, str) else one) for one in reading.labels)
        return [LabelledItem(id=reading.id, parts=parts, channel=channel, labels=labels)]

    def titles(self, item: LabelledItem) -> list[str]:
        """Returns the labels."""
        return [f"label {self.labels[int(label)] if self.labels else label}" for label in item.labels]

    def batch(self, items: list[LabelledItem]) -> Labelled:
        """Returns R sequences packed to T tokens, those of one query side by side."""
        return Labelled(
            **packed(items),
            label=torch.tensor([label for item in items for label in item.labels], dtype=torch.float32),
            group=torch.tensor([index for index, item in enumerate(items) for _ in item.parts]),
        )

    def state(self) -> dict[str, Any]:
        """Returns where the walk stands, and the classes."""
        return super().state() | {"labels": list(self.labels)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the position in `state`, whose classes must be those of the data, in their order."""
        if state.get("labels", []) != list(self.labels):
            raise DataError(
                f"the classes are not those of the checkpoint: they were {state.get('labels')} and are now "
                f"{list(self.labels)}; set data.labels to those of the checkpoint, or start a new run"
            )
        super().restore(state)


def _ranked(record: Record) -> Labelling:
    query = text_field(record, ("query",))
    if record.has("documents"):
        documents, values = text_list(record, ("documents",)), record.fields.get("labels")
        if not isinstance(values, list) or len(values) != len(documents) or not documents:
            raise DataError(
                f"{record.where}: expected 'labels' to be a list of numbers, one for each of the {len(documents)} "
                f"'documents', found {values!r:.60}"
            )
        labels = tuple(_label(record, f"labels[{index}]", value, None) for index, value in enumerate(values))
        if any(isinstance(label, str) for label in labels):
            raise DataError(f"{record.where}: expected 'labels' to be numbers, found {values!r:.60}")
    else:
        near, far = text_list(record, NEAR_KEYS), far_texts(record)
        if not near or not far:
            raise DataError(
                f"{record.where}: expected 'documents' with 'labels', or 'positive' and 'negative', beside 'query', "
                f"found the fields {record.names}"
            )
        documents, labels = near + far, (1.0,) * len(near) + (0.0,) * len(far)
    texts = tuple(f"{query}\n{document}" for document in documents)
    return Labelling(record=record, texts=texts, messages=(), labels=labels, prompt_text=query)


def _label(record: Record, key: str, value: Any, names: list[str] | None) -> Label:
    """Returns a class by name, its number, or a number to predict."""
    if isinstance(value, str) and (names is None or value in names):
        return value
    if names is None and (isinstance(value, bool) or is_number(value)):
        return float(value)
    expected = f"one of data.labels, {', '.join(names)}" if names else "a name or a number"
    raise DataError(f"{record.where}: expected {key!r} to be {expected}, found {value!r:.60}")


SOURCE = LabelledSource
