"""Checks whether two models have the same tokens."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.utils.faults import Fault


def faults(
    policy: ModelConfig, policy_folder: Path, other: ModelConfig, other_folder: Path, *, key: str
) -> Iterator[Fault]:
    """Yields a fault if the tokenizer of `other`, named by `key`, differs from the policy's. Raises CheckpointError if
    it has none."""
    ours, theirs = vocabulary(policy_folder), vocabulary(other_folder)
    if digest(ours) == digest(theirs):
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    token = differing[0]
    yield Fault(
        key,
        f"must name a model with the tokenizer of model.path={policy.path}",
        got=other.path,
        why=f"{len(differing)} tokens differ, such as {token!r}, which is "
        f"{ours.get(token, 'missing')} here and {theirs.get(token, 'missing')} there",
    )


def vocabulary(folder: Path) -> dict[str, int]:
    """Returns the id of each token of the tokenizer in `folder`, added tokens included."""
    return tokenizer.load(folder).get_vocab()


def digest(tokens: dict[str, int]) -> str:
    """Returns a hash of the whole vocabulary, independent of the tokenizer's order."""
    return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()
