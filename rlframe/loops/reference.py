"""The reference's logprobs of all data, computed in one pass before training and kept on disk."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save
from torch import Tensor

from rlframe.data.training import Item, TrainingSource
from rlframe.megatron.driver.policy import PolicyGroup
from rlframe.types.batch import Sequences
from rlframe.utils.files.whole import write_whole, writing

CHUNK_ITEMS = 512
"""Number of items that are packed at a time in a pass over all data."""


def batches(stream: TrainingSource[Any], items: list[Item]) -> Iterator[Sequences]:
    """Yields the items in batches of CHUNK_ITEMS."""
    for first in range(0, len(items), CHUNK_ITEMS):
        yield stream.batch(items[first : first + CHUNK_ITEMS])


class PrecomputedReference:
    """A Model that returns the policy's logprobs from the policy and the reference's from a file.

    The file is named by the weights that computed it, and each entry by its tokens and which of them the loss counts.
    Entries of other weights, another tokenizer or template, or other records are therefore not found, and are
    recomputed.
    """

    def __init__(self, policy: PolicyGroup, folder: Path):
        self.policy, self.folder = policy, folder
        self._known: dict[bytes, Tensor] = {}

    def fill(self, stream: TrainingSource[Any], *, print_line: Callable[[str], None]) -> None:
        """Makes sure that all items of the stream are known. The policy must have the weights of the reference."""
        file = self.folder / f"{self.policy.fingerprint()}.safetensors"
        self._known = read(file)
        before = len(self._known)
        for batch in batches(stream, stream.first(len(stream)) + stream.held_out()):
            self._add(batch)
        if made := len(self._known) - before:
            write(file, self._known)
            print_line(f"reference logprobs of {made} sequences computed and kept in {file}")

    def logprobs(self, batch: Sequences, *, reference: bool = False) -> Float[Tensor, " T"]:
        """Returns [T] nats; see Model. Those of the reference exist only for sequences of the stream."""
        if not reference:
            return self.policy.logprobs(batch)
        return torch.cat([self._known[key] for key in keys(batch)])

    def values(self, batch: Sequences) -> Float[Tensor, "T C"]:
        """Returns [T, C] values; see Model."""
        return self.policy.values(batch)

    def states(self, batch: Sequences) -> Float[Tensor, "R H"]:
        """Returns [R, H] states; see Model."""
        return self.policy.states(batch)

    def _add(self, batch: Sequences) -> None:
        missing = {key: index for index, key in enumerate(keys(batch)) if key not in self._known}
        if not missing:
            return
        alone = Sequences(token_ids=batch.token_ids, lengths=batch.lengths, loss_mask=batch.loss_mask)
        chosen = alone.select(list(missing.values()))
        values = self.policy.logprobs(chosen).split(chosen.lengths.tolist())
        self._known |= dict(zip(missing, values, strict=True))


def keys(batch: Sequences) -> list[bytes]:
    """Returns [R] sha256 of each sequence's tokens and loss mask. On these alone its logprobs depend: they are 0 of
    tokens that the loss does not count."""
    lengths = batch.lengths.tolist()
    parts = zip(batch.token_ids.split(lengths), batch.loss_mask.split(lengths), strict=True)
    return [hashlib.sha256(tokens.numpy().tobytes() + mask.numpy().tobytes()).digest() for tokens, mask in parts]


def read(file: Path) -> dict[bytes, Tensor]:
    """Returns [L] logprobs by key. Empty if the file does not exist."""
    if not file.exists():
        return {}
    held = load_file(file)
    names = (bytes(row) for row in held["keys"].numpy())
    return dict(zip(names, held["logprobs"].split(held["lengths"].tolist()), strict=True))


def write(file: Path, known: dict[bytes, Tensor]) -> None:
    """Writes the file, which is complete or absent."""
    values: Iterable[Tensor] = known.values()
    tensors = {
        "keys": torch.frombuffer(bytearray(b"".join(known)), dtype=torch.uint8).view(len(known), -1),
        "lengths": torch.tensor([len(value) for value in values]),
        "logprobs": torch.cat(list(values)),
    }
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save(tensors))
