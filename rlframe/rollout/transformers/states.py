"""States of the sequences being decoded, in the layers that have a gated delta net instead of keys and values.

transformers reads and writes them through the cache that the caller passes to `model(..., past_key_values=...)`. This
one has a row for each slot, as `KVCache` has; keys and values, which `attend` stores, it passes on.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KIND = "linear_attention"
"""transformers' name of such a layer in `layer_types`."""


class States:
    """The last inputs of the convolution and the state of the rule, of S sequences in each layer."""

    def __init__(self, *, num_slots: int):
        self.num_slots = num_slots
        self._convolved: dict[int, Tensor] = {}
        self._states: dict[int, Tensor] = {}
        self._targets = self._sources = torch.empty(0, dtype=torch.int64)
        self._rows: int | None = None
        """Number of slots of which the forward pass decodes a token. None in a pass over whole prompts."""

    def prefill(self, slots: Tensor, prompts: Tensor) -> None:
        """Makes the next forward pass one over whole prompts of one length; see `KVCache.prefill`."""
        self._targets, self._sources, self._rows = slots, prompts, None

    def decode(self, rows: int) -> None:
        """Makes the next forward pass one over a single token of each of the first `rows` slots."""
        self._rows = rows

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots `sources` to slots `targets`."""
        for memory in (*self._convolved.values(), *self._states.values()):
            memory[targets] = memory[sources]

    def clear(self, slots: Tensor) -> None:
        """Makes slots those of sequences without a token."""
        for memory in (*self._convolved.values(), *self._states.values()):
            memory[slots] = 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Returns whether the pass continues sequences."""
        return self._rows is not None

    @property
    def layers(self) -> "States":
        """Itself, which transformers asks for the layer with a number."""
        return self

    def __getitem__(self, layer: int) -> Any:
        """Returns the states of the slots that decode, in memory that transformers may write to."""
        own = {"conv_states": self._convolved, "recurrent_states": self._states}
        found = {name: {0: memory[layer][: self._rows]} for name, memory in own.items() if layer in memory}
        return SimpleNamespace(record_past=False, **found)

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values alone, because `attend` has the others."""
        return key, value

    def update_conv_state(self, inputs: Tensor, layer: int, *, conv_kernel_size: int, **_: Any) -> Tensor:
        """Returns the inputs [B, channels, Q] of the convolution of whole prompts, and keeps the last ones."""
        last = F.pad(inputs, (conv_kernel_size, 0))[..., -conv_kernel_size:]
        self._keep(self._convolved, layer, last)
        return inputs

    def update_recurrent_state(self, states: Tensor, layer: int, **_: Any) -> Tensor:
        """Keeps the states after the pass, and returns them."""
        if self._rows is None:
            self._keep(self._states, layer, states)
        else:
            self._states[layer][: self._rows] = states
        return states

    def _keep(self, memory: dict[int, Tensor], layer: int, values: Tensor) -> None:
        if layer not in memory:
            memory[layer] = values.new_zeros(self.num_slots, *values.shape[1:])
        memory[layer][self._targets] = values.index_select(0, self._sources)
