"""Raw text that is learned as a whole: pre-training. A record is {text}, or a .txt file; `data.prompt_key` names
another field."""

from collections.abc import Sequence

import numpy as np

from rlframe.data.config import DataConfig, TextLayout
from rlframe.data.items import Item
from rlframe.data.records import Record
from rlframe.data.text.documents import Document, document, text_field
from rlframe.data.text.turns import Tokens
from rlframe.data.training import TrainingSource, examples_of
from rlframe.types.supervised import Examples

SHORTEST_TOKENS = 2
"""Least number of tokens of a sequence, because one token predicts nothing."""
EMPTY = "text is empty"
"""Reason of leaving a record out."""


class TextSource(TrainingSource[Item]):
    """Documents, each begun as the tokenizer begins a text and ended by the end-of-text token, as sequences of at most
    `max_tokens` and `max_positions`."""

    unit = "text"
    item = Item
    settings = frozenset({"prompt_key", "text_layout"})

    @staticmethod
    def understand(record: Record, config: DataConfig) -> Document:
        """Returns the text, which may be empty: corpora have such records among the others."""
        key = config.prompt_key or "text"
        if isinstance(text := record.fields.get(key), str) and not text.strip():
            return Document(record=record, text="")
        return Document(record=record, text=text_field(record, (key,), "data.prompt_key"))

    def make(self, readings: Sequence[Document], channel: int) -> list[Item]:
        """Returns the sequences that the documents are cut to, as `data.text_layout` says."""
        if self.config.text_layout is TextLayout.SEPARATE:
            return super().make(readings, channel)

        documents = [document for some in self.spread(self._documents, readings) for document in some]
        if empty := sum(not len(document) for document in documents):
            self.dropped[EMPTY] += empty
        joined = np.concatenate(documents) if documents else np.zeros(0, dtype=np.int32)
        # The numbers are part of the ids that shuffling goes by; the fingerprint sees other documents by their tokens.
        return self._cut(joined, f"{self.channels[channel]}:", channel)

    def items(self, reading: Document, channel: int) -> list[Item]:
        """Returns one, or as many as the document is times longer than allowed; none if it is empty."""
        if not reading.text:
            self.dropped[EMPTY] += 1
        return self._cut(self._token_ids(reading), f"{reading.id}:", channel)

    def batch(self, items: list[Item]) -> Examples:
        """Returns R sequences packed to T tokens, in their order."""
        return examples_of(items, self.channels)

    def _documents(self, readings: Sequence[Document]) -> list[np.ndarray]:
        return [self._token_ids(reading) for reading in readings]

    def _token_ids(self, reading: Document) -> np.ndarray:
        if not reading.text:
            return np.zeros(0, dtype=np.int32)
        token_ids = document(reading.text, self.tokenizer, config=self.config, where=reading.record.where)
        return np.array(token_ids, dtype=np.int32)

    def _cut(self, token_ids: np.ndarray, prefix: str, channel: int) -> list[Item]:
        most = min(self.max_tokens, self.max_positions or self.max_tokens)
        pieces = [token_ids[start : start + most] for start in range(0, len(token_ids), most)]
        if pieces and len(pieces[-1]) < SHORTEST_TOKENS:
            pieces.pop()
            self.dropped["single token at an end"] += 1
        return [
            Item(id=f"{prefix}{number}", parts=(Tokens(token_ids=piece, weights=learnt(piece)),), channel=channel)
            for number, piece in enumerate(pieces)
        ]


def learnt(token_ids: np.ndarray) -> np.ndarray:
    """Returns [L] 1.0 on all tokens but the first, which nothing predicts."""
    weights = np.ones(len(token_ids), dtype=np.float32)
    weights[0] = 0.0
    return weights


SOURCE = TextSource
