"""Prompt: a task to attempt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlframe.types.input import ModelInput
from rlframe.types.messages import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A task to attempt, with a stable id and the data that rewards need.

    Example:
        >>> tokens = ModelInput((1, 7, 12, 8, 14, 3, 2))
        >>> Prompt(id="train.jsonl:0", text="<user>2+3=<end><assistant>", input=tokens, answer="5")
    """

    id: str
    """Stable across runs, resumes and shuffles: the record's own id, or a hash of its content."""
    messages: tuple[Message, ...] = ()
    """The conversation that the model continues, as the data has it. Empty where nothing renders messages."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the data offers."""
    text: str
    """The rendered chat template, up to and including the generation prompt."""
    input: ModelInput
    """The sequence that engines continue, of L_prompt tokens."""
    answer: str | None = None
    """Ground truth. None if the data has none."""
    source: str = ""
    """Name of the file, or of the dataset of the hub or the package, that the prompt comes from."""
    dataset: str = ""
    """Name of its dataset among several of `data.path`, as in metrics. Empty if there is only one, and for problems
    that built-in datasets share."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The raw record, for rewards that use more than `answer`."""
