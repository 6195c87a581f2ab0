"""Rules of the data that depend on the algorithm: which settings its kind of data looks at."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from rlframe.algorithms.base import Algorithm
from rlframe.data.chat import render
from rlframe.data.config import DataConfig
from rlframe.data.conversations import Conversation, understand
from rlframe.data.kinds import find_stream
from rlframe.data.kinds.labelled import Labelling
from rlframe.data.prompts import PromptStream
from rlframe.data.sources import load
from rlframe.data.streaming import check_beginning
from rlframe.models import hub, tokenizer
from rlframe.run.config import RunConfig
from rlframe.utils.errors import CheckpointError, ConfigError, DataError
from rlframe.utils.faults import Fault

OFFLINE = frozenset({"cache_folder", "cache_gb", "streaming", "shuffle_buffer"})
"""Fields of DataConfig that every kind of offline data looks at."""
OF_SOME_KINDS = (
    "prompt_key",
    "answer_key",
    "system_prompt",
    "last_turn_only",
    "text_layout",
    "labels",
    "template_limit_s",
    "max_prompt_tokens",
    "cache_folder",
    "cache_gb",
    "streaming",
    "shuffle_buffer",
)
"""Fields of DataConfig that not every kind of data looks at."""


def setting_faults(data: DataConfig, algorithm: Algorithm, *, name: str) -> Iterator[Fault]:
    """Settings that the algorithm's kind of data does not look at."""
    used, what = set(PromptStream.settings if algorithm.online else OFFLINE), ""
    if kind := learnt_kind(algorithm):
        used |= kind.settings
        what = f", which trains on {algorithm.requirements.data}"
    defaults = {field.name: field.default for field in fields(DataConfig)}
    for key in OF_SOME_KINDS:
        value = getattr(data, key)
        if key not in used and value != defaults[key]:
            yield Fault(f"data.{key}", f"has no effect with algorithm.name={name}{what}", got=value, hint="remove it")
    if data.streaming and algorithm.precomputes_reference:
        yield Fault(
            "algorithm.reference",
            "must be live with data.streaming=true",
            got="precomputed",
            why="not all data is known before training",
        )


def read_all(data: DataConfig, algorithm: Algorithm, *, seed: int) -> list[Any]:
    """The readings of the whole dataset to train on, or of the beginning of a streamed one. Raises DataError."""
    kind = learnt_kind(algorithm)
    reader = kind.understand if kind else understand
    if data.streaming:
        return check_beginning(data, reader)
    return [reading for part in load(data, seed=seed, understand=reader).train for reading in part]


def nothing_to_judge(readings: Sequence[Any], needing: Sequence[str], *, what: str) -> Iterator[Fault]:
    """Data that every reward and every label is the same for.

    Args:
        needing: names of the rewards that cannot do without an answer.
        what: the dataset, for messages.
    """
    if needing and not any(isinstance(one, Conversation) and one.answer is not None for one in readings):
        yield Fault(
            "data.answer_key",
            f"must name the field with the answer, which reward.parts.{needing[0]} compares with",
            why=f"no record of {what} has one",
        )
    labels = {label for one in readings if isinstance(one, Labelling) for label in one.labels}
    if len(labels) == 1:
        yield Fault(
            "data.path",
            f"has the label {labels.pop()!r:.60} on every record",
            got=what,
            why="there is nothing to tell apart",
            stated=True,
        )


def template_faults(run: RunConfig, readings: Sequence[Any], *, generation_prompt: bool) -> Iterator[Fault]:
    """A chat template that cannot write the first record, or leaves out what the user says in it."""
    messages = next((reading.messages for reading in readings[:1]), ())
    # What ends with the user, or the prompt before the assistant's last turn.
    prompt = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not prompt:
        return
    try:
        tokens = tokenizer.load(hub.resolve(run.model))
        where = f"{run.data.what}: the first record"
        text = render(tokens, prompt, config=run.data, generation_prompt=generation_prompt, where=where).text
    except (CheckpointError, ConfigError):
        # Told where the model is looked at.
        return
    except DataError as error:
        yield Fault("data", said=error)
        return
    said = prompt[-1]["content"].strip()
    if said not in text:
        yield Fault(
            "model.path",
            said=f"the chat template of {tokens.name_or_path!r} leaves out what the user says: {said!r:.60}",
        )


def learnt_kind(algorithm: Algorithm) -> Any:
    """Returns the stream of the data's own responses, or None unless they are trained on in some steps at least."""
    required = algorithm.requirements
    return find_stream(required.data) if required.data is not None and required.responses else None
