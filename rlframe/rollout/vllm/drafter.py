"""The model with which vLLM drafts, if it is the policy's head for multi-token prediction and weight sync brings that.

vLLM loads the head as a model of its own, with an embedding and an output layer that it then replaces by the policy's.
What is the head's alone joins the layout of the rank, so that a sync fills and proves it like the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlframe.rollout.served.recording import LoadNotes, formats_of
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.memory import MemoryLayout, joined

DRAFT = "draft"
"""vLLM's `runner_type` of a model that only drafts."""
DRAFT_NOTES = "rlframe_draft_notes"
"""Attribute of the loaded drafter that holds its `DraftNotes`."""
PREFIX = "drafter."
"""Beginning of the names of the drafter's parameters in the layout of a rank."""


@dataclass(frozen=True, slots=True)
class DraftNotes:
    """Results of recording the load of the drafter."""

    tensors: dict[str, tuple[int, ...]]
    """Shape of every tensor of the checkpoint, the head's among them."""
    recorded: MemoryLayout | None
    """Layout as loaded, without parameters that the loader does not fill. None if it could not be recorded."""
    refusal: str
    """Reason why the memory is not as recorded, as a clause whose subject is the engine. Empty if it is."""
    record_s: float
    """Seconds that recording took."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """The drafter, without what it shares with the policy."""

    model: Any
    notes: DraftNotes
    parameters: dict[str, Tensor]
    """Its own parameters, by the names of a rank's layout."""
    boxes: frozenset[str]
    """The checkpoint's tensors of which its own parameters hold a part."""
    buffers: dict[str, tuple[Tensor, Tensor]]
    """Its own buffers by name, each with a copy in host memory."""

    @classmethod
    def of(cls, model: Any, policy: Any) -> "Drafter":
        """Returns the loaded drafter `model` beside `policy`, whose modules it shares by now.

        Raises:
            WeightSyncFailed: it reads a parameter that is neither the policy's nor filled from the checkpoint.
        """
        notes: DraftNotes = getattr(model, DRAFT_NOTES)
        if notes.recorded is None:
            raise WeightSyncFailed(f"the head for multi-token prediction cannot be synced: vLLM {notes.refusal}")
        shared = {id(each) for each in (*policy.parameters(), *policy.buffers())}
        held = {name: value for name, value in model.named_parameters() if id(value) not in shared}
        if unknown := sorted(held.keys() - notes.recorded.parameters.keys()):
            raise WeightSyncFailed(
                f"vLLM's drafter reads {unknown[0]}, which is neither a parameter of the policy nor filled from its "
                "checkpoint, so that no sync could prove it"
            )
        boxes = {name for name, boxes in notes.recorded.boxes.items() if any(box.parameter in held for box in boxes)}
        buffers = {
            name: (value, value.to("cpu", copy=True))
            for name, value in model.named_buffers()
            if id(value) not in shared
        }
        return cls(model, notes, {PREFIX + name: value for name, value in held.items()}, frozenset(boxes), buffers)

    def joined(self, policy: LoadNotes) -> LoadNotes:
        """Returns the notes of the policy and its head together."""
        recorded = self.notes.recorded
        assert recorded is not None, "see `of`"
        refusal, layout = policy.refusal or self.notes.refusal, None
        if policy.layout is not None and not refusal:
            own = {name.removeprefix(PREFIX): name for name in self.parameters}
            layout = joined(policy.layout, recorded, parameters=own)
        return LoadNotes(
            tensors=policy.tensors | self.notes.tensors,
            parameters=policy.parameters | self.parameters.keys(),
            layout=layout,
            refusal=refusal,
            record_s=policy.record_s + self.notes.record_s,
            formats={**formats_of(recorded, {}, ()), **policy.formats},
        )

    def refill(self) -> None:
        """Restores the buffers after a sleep that has dropped them. vLLM 0.26 to 0.32 restores those of the policy
        alone (`Worker.sleep`)."""
        for value, copy in self.buffers.values():
            value.copy_(copy)


def of_runner(runner: Any, policy: Any) -> Drafter | None:
    """Returns the drafter of vLLM's model runner in this process. None without one that weight sync fills."""
    model = runner.get_draft_model()
    return None if model is None or not hasattr(model, DRAFT_NOTES) else Drafter.of(model, policy)


def parameters_with(drafter: Drafter | None, policy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters of the policy and of its head."""
    return dict(policy) if drafter is None else dict(policy) | drafter.parameters
