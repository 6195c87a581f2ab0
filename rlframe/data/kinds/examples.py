"""Whole conversations of which the assistant's turns are learned: supervised fine-tuning."""

from rlframe.data.config import TEMPLATE_SETTINGS, DataConfig
from rlframe.data.items import Item
from rlframe.data.records import Record
from rlframe.data.text.conversations import Conversation, check_learnt, check_unweighted, check_whole, understand
from rlframe.data.text.turns import Encoded, encode_turns
from rlframe.data.training import TrainingSource, examples_of
from rlframe.types.supervised import Examples
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError


class ExampleSource(TrainingSource[Item]):
    """Conversations, one sequence each, or several where the chat template rewrites earlier turns. Holds out the same
    records as `PromptSource`."""

    unit = "example"
    item = Item
    settings = TEMPLATE_SETTINGS | {"prompt_key", "answer_key", "system_prompt", "last_turn_only"}

    @staticmethod
    def understand(record: Record, config: DataConfig) -> Conversation:
        """Returns the conversation in the record; it must end with the assistant."""
        check_unweighted(record)
        check_whole(record, config)
        conversation = understand(record, config)
        if conversation.messages[-1]["role"] != "assistant":
            raise DataError(
                f"{record.where}: expected the last message from the assistant, found "
                f"{conversation.messages[-1]['role']!r}, in a record with the fields {', '.join(record.fields)}; "
                "name the field of a response with data.answer_key"
            )
        check_learnt(conversation, config)
        return conversation

    def items(self, reading: Conversation, channel: int) -> list[Item]:
        """Returns one for each sequence; none if no turn has a weight."""
        if not any(_learnt(reading)):
            self.dropped["no turn has a weight"] += 1
            return []
        encoded = learnt_turns(reading, self.tokenizer, config=self.config)
        self.count(encoded)
        several = len(encoded.sequences) > 1
        return [
            Item(id=f"{reading.id}#{index}" if several else reading.id, parts=(tokens,), channel=channel)
            for index, tokens in enumerate(encoded.sequences)
        ]

    def batch(self, items: list[Item]) -> Examples:
        """Returns R examples packed to T tokens, in their order."""
        return examples_of(items, self.channels)


def learnt_turns(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, *, config: DataConfig) -> Encoded:
    """Returns the conversation's sequences, learnt wherever the assistant speaks with a weight."""
    where, tools = conversation.record.where, conversation.tools
    weights = _learnt(conversation)
    return encode_turns(conversation.messages, weights, tokenizer=tokenizer, config=config, where=where, tools=tools)


def _learnt(conversation: Conversation) -> list[float]:
    pairs = zip(conversation.messages, conversation.weights, strict=True)
    return [weight if message["role"] == "assistant" else 0.0 for message, weight in pairs]


SOURCE = ExampleSource
