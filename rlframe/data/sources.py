"""The records of a run, cut into what it trains on and what it holds out."""

import hashlib
from collections import Counter
from dataclasses import dataclass

from rlframe.data import arithmetic
from rlframe.data.config import DataConfig, split_count
from rlframe.data.conversations import Conversation, understand
from rlframe.data.records import read
from rlframe.utils.errors import DataError


@dataclass(kw_only=True, slots=True)
class Conversations:
    """What `load` found."""

    train: list[Conversation]
    """In the order of the files; no prompt of `held_out` is among them."""
    held_out: list[Conversation]
    """At most `evaluation_count`, the same ones for every seed."""
    dropped: Counter[str]
    """Records left out, by reason."""


def load(config: DataConfig, *, seed: int) -> Conversations:
    """Reads `config.path`, holds records out, and drops what may not be trained on.

    Args:
        seed: decides which records a `#500` suffix keeps, nothing else.

    Raises:
        DataError: a source that is missing, empty or malformed, or nothing left to train on.
    """
    path, count = split_count(config.path)
    dropped: Counter[str] = Counter()
    everything = _conversations(path, arithmetic.Split.TRAIN, config, dropped)
    if config.evaluation_path is not None or path in arithmetic.NAMES:
        held_out = _conversations(config.evaluation_path or path, arithmetic.Split.HELD_OUT, config, dropped)
    else:
        held_out = sort_by_hash(everything, salt="held out")[: min(config.evaluation_count, len(everything) // 10)]
        ids = {conversation.id for conversation in held_out}
        everything = [conversation for conversation in everything if conversation.id not in ids]
    # An id is not enough: two files may number different records alike, or hold one prompt under two ids.
    prompts = {_prompt_text(conversation) for conversation in held_out}
    train = [conversation for conversation in everything if _prompt_text(conversation) not in prompts]
    if leaked := len(everything) - len(train):
        dropped["prompt is held out"] = leaked
    if count is not None:
        kept = {conversation.id for conversation in sort_by_hash(train, salt=f"subset {seed}")[:count]}
        train = [conversation for conversation in train if conversation.id in kept]
    if not train:
        raise DataError(f"{config.path}: expected records to train on, found none; dropped: {dict(dropped)}")
    return Conversations(
        train=train, held_out=sort_by_hash(held_out, salt="held out")[: config.evaluation_count], dropped=dropped
    )


def sort_by_hash(conversations: list[Conversation], *, salt: str) -> list[Conversation]:
    """A fixed pseudo-random order that depends on the ids and the salt alone."""
    return sorted(conversations, key=lambda one: hashlib.sha256(f"{salt}:{one.id}".encode()).digest())


def _conversations(path: str, part: arithmetic.Split, config: DataConfig, dropped: Counter[str]) -> list[Conversation]:
    records = arithmetic.records(path, part) if path in arithmetic.NAMES else read(path)
    unique: dict[str, Conversation] = {}
    for record in records:
        conversation = understand(record, config)
        if unique.setdefault(conversation.id, conversation) is not conversation:
            dropped["duplicate id"] += 1
    return list(unique.values())


def _prompt_text(conversation: Conversation) -> str:
    return "\x00".join(f"{message['role']}\x00{message['content']}" for message in conversation.prompt)
