"""Whole conversations, learnt where the assistant speaks: supervised fine-tuning."""

from transformers import PreTrainedTokenizerBase

from rlframe.data.config import DataConfig
from rlframe.data.conversations import Conversation, understand
from rlframe.data.records import Record
from rlframe.data.training import Item, TrainingStream, packed
from rlframe.data.turns import Tokens, encode_turns
from rlframe.types.batch import Sequences
from rlframe.utils.errors import DataError


class ExampleStream(TrainingStream[Item]):
    """Conversations, one sequence each. Holds out the same records as `PromptStream`."""

    unit = "example"

    @staticmethod
    def understand(record: Record, config: DataConfig) -> Conversation:
        """The conversation in the record; it must end with the assistant."""
        conversation = understand(record, config)
        if conversation.messages[-1]["role"] != "assistant":
            raise DataError(
                f"{record.where}: expected the last message from the assistant, found "
                f"{conversation.messages[-1]['role']!r}"
            )
        return conversation

    def items(self, reading: Conversation, channel: int) -> list[Item]:
        """One."""
        return [Item(id=reading.id, parts=(every_turn(reading, self.tokenizer),), channel=channel)]

    def batch(self, items: list[Item]) -> Sequences:
        """R examples packed to T tokens, in their order."""
        return Sequences(**packed(items))


def every_turn(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The conversation's tokens, learnt wherever the assistant speaks."""
    weights = [float(message["role"] == "assistant") for message in conversation.messages]
    return encode_turns(conversation.messages, weights, tokenizer=tokenizer, where=conversation.record.where)


STREAM = ExampleStream
