"""Responses that are each labelled desirable or not: KTO.

| shape | response | verdict |
|---|---|---|
| {messages, label} | the last turn | label |
| {prompt, completion, label}, as text or messages, and whatever else `conversations` knows | the completion | label |
| LLaMA-Factory {instruction, input, output, kto_tag} | output | kto_tag |
"""

from dataclasses import dataclass

import torch

from rlframe.data.config import TEMPLATE_SETTINGS, DataConfig
from rlframe.data.items import Item
from rlframe.data.kinds.examples import ExampleSource
from rlframe.data.records import Record
from rlframe.data.text.conversations import OF_MESSAGES, Conversation
from rlframe.data.text.turns import encode_turns
from rlframe.data.training import TrainingSource, packed
from rlframe.types.messages import Message
from rlframe.types.supervised import Unpaired
from rlframe.utils.errors import DataError

LABEL_KEYS = ("label", "kto_tag")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A record, parsed."""

    conversation: Conversation
    """Conversation that ends with the response."""
    desirable: bool

    @property
    def id(self) -> str:
        """The id of the record."""
        return self.conversation.id

    @property
    def messages(self) -> tuple[Message, ...]:
        """All turns."""
        return self.conversation.messages

    @property
    def prompt_text(self) -> str:
        """The turns before the response, for comparisons."""
        return self.conversation.prompt_text


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnpairedItem(Item):
    """One response."""

    desirable: bool


class UnpairedSource(TrainingSource[UnpairedItem]):
    """Responses, one sequence each, learnt in the last turn."""

    unit = "response"
    item = UnpairedItem
    settings = TEMPLATE_SETTINGS | {"prompt_key", "answer_key", "system_prompt"}

    @staticmethod
    def understand(record: Record, config: DataConfig) -> Verdict:
        """Returns the response and its verdict."""
        key = record.first(LABEL_KEYS)
        if key is None:
            raise DataError(
                f"{record.where}: expected {' or '.join(map(repr, LABEL_KEYS))}, true for a response to learn and "
                f"false for one to unlearn, found the fields {record.names}"
            )
        value = record.fields[key]
        if not isinstance(value, bool):
            raise DataError(f"{record.where}: expected {key!r} to be true or false, found {value!r:.60}")
        conversation = ExampleSource.understand(record, config)
        for name in OF_MESSAGES:
            given = record.fields.get(name)
            if isinstance(given, list) and len(given) > 1:
                raise DataError(
                    f"{record.where}: expected {name!r} to be one message, as a label judges the last turn alone, "
                    f"found {len(given)}; put the messages before it into the prompt"
                )
        if conversation.weights[-1] != 1:
            raise DataError(
                f"{record.where}: expected no weight on the response, which counts as a whole, found "
                f"{conversation.weights[-1]}; algorithm.desirable_weight and undesirable_weight are of the classes"
            )
        return Verdict(conversation=conversation, desirable=value)

    def items(self, reading: Verdict, channel: int) -> list[UnpairedItem]:
        """Returns one."""
        messages, where = reading.conversation.messages, reading.conversation.record.where
        weights = [0.0] * (len(messages) - 1) + [1.0]
        encoded = encode_turns(
            messages,
            weights,
            tokenizer=self.tokenizer,
            config=self.config,
            where=where,
            tools=reading.conversation.tools,
        )
        self.count(encoded)
        # Only the last turn is learned.
        return [UnpairedItem(id=reading.id, parts=encoded.sequences, channel=channel, desirable=reading.desirable)]

    def titles(self, item: UnpairedItem) -> list[str]:
        """Returns the verdict."""
        return ["desirable" if item.desirable else "undesirable"]

    def batch(self, items: list[UnpairedItem]) -> Unpaired:
        """Packs R responses to T tokens, in their order."""
        return Unpaired(
            **packed(items),
            desirable=torch.tensor([item.desirable for item in items]),
            kl_nats=torch.zeros(len(items)),
        )


SOURCE = UnpairedSource
