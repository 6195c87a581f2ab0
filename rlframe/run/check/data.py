"""Rules about the data that depend on the algorithm: which settings its kind of data uses."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlframe.algorithms.base import Algorithm
from rlframe.algorithms.classification import ClassificationConfig
from rlframe.algorithms.reranker import RerankerConfig, RerankerLoss
from rlframe.data.config import DataConfig
from rlframe.data.curriculum import By, CurriculumConfig
from rlframe.data.kinds import find_source
from rlframe.data.kinds.labelled import Label, Labelling
from rlframe.data.prompts import PromptSource
from rlframe.data.sources import load
from rlframe.data.storage.sequences import Joined
from rlframe.data.streaming import check_beginning
from rlframe.data.text.chat import end_token, render
from rlframe.data.text.conversations import Conversation, understand
from rlframe.data.text.template import kwargs_faults
from rlframe.environments.base import rewards
from rlframe.models import chat_template, hub, tokenizer
from rlframe.run.check.context import algorithm_of
from rlframe.run.config import RunConfig
from rlframe.utils.errors import CheckpointError, ConfigError, DataError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

OFFLINE = frozenset({"cache_folder", "cache_gb", "streaming", "shuffle_buffer"})
"""Fields of DataConfig that every kind of offline data uses."""
OF_SOME_KINDS = (
    "prompt_key",
    "answer_key",
    "system_prompt",
    "last_turn_only",
    "text_layout",
    "labels",
    "chat_template",
    "chat_template_kwargs",
    "chat_template_date",
    "template_limit_s",
    "max_prompt_tokens",
    "cache_folder",
    "cache_gb",
    "streaming",
    "shuffle_buffer",
    "curriculum",
)
"""Fields of DataConfig that only some kinds of data use."""


def setting_faults(data: DataConfig, algorithm: Algorithm, *, name: str) -> Iterator[Fault]:
    """Rejects settings that the algorithm's kind of data does not use."""
    used, what = set(PromptSource.settings if algorithm.online else OFFLINE), ""
    if kind := learnt_kind(algorithm):
        used |= kind.settings
        what = f", which trains on {algorithm.requirements.data}"
    defaults = {field.name: field.default for field in fields(DataConfig)}
    for key in OF_SOME_KINDS:
        value = getattr(data, key)
        if key not in used and value != defaults[key]:
            got = value.by if isinstance(value, CurriculumConfig) else value
            yield Fault(f"data.{key}", f"has no effect with algorithm.name={name}{what}", got=got, hint="remove it")
    if data.streaming and algorithm.online and algorithm.requirements.responses:
        yield Fault(
            "data.streaming",
            f"must be false with algorithm.name={name}, with these settings",
            got="true",
            why="it learns from the data's own responses in some steps, which it finds by their prompts",
        )
    if data.streaming and algorithm.precomputes_reference:
        yield Fault(
            "algorithm.reference",
            "must be live with data.streaming=true",
            got="precomputed",
            why="not all data is known before training",
        )


def curriculum_faults(run: RunConfig) -> Iterator[Fault]:
    """Checks that there are pass rates, where the order of prompts follows them, and steps for every stage."""
    curriculum = run.data.curriculum
    if curriculum is None or not algorithm_of(run).online:
        return
    rated = run.reward_names or rewards(run.environment)
    if curriculum.by is By.PASS_RATE and not rated:
        yield Fault("data.curriculum.by", "needs a reward", got=curriculum.by, why="nothing else is a pass rate")
    part = curriculum.reward_part
    if part is not None and rated and part not in run.reward_names:
        rule = f"must be one of reward.parts, {', '.join(run.reward_names) or 'of which there is none'}"
        yield Fault("data.curriculum.reward_part", rule, got=repr(part), hint=did_you_mean(part, run.reward_names))
    for name, first in (curriculum.stages or {}).items():
        if first > run.steps > 0:
            yield Fault(
                f"data.curriculum.stages.{name}",
                f"must be at most steps={run.steps}",
                got=first,
                hint="remove the stage",
            )


def read_all(data: DataConfig, algorithm: Algorithm, *, seed: int) -> Sequence[Any]:
    """Returns the readings of the whole dataset to train on, or of the beginning of a streamed one.

    Raises:
        DataError: a record or a source is wrong.
    """
    kind = learnt_kind(algorithm)
    reader = kind.understand if kind else understand
    if data.streaming:
        return check_beginning(data, reader)
    return Joined(load(data, seed=seed, understand=reader).train)


def nothing_to_judge(
    readings: Sequence[Any],
    needing: Sequence[str],
    *,
    what: str,
    settings: Any = None,
    names: Sequence[str] | None = None,
) -> Iterator[Fault]:
    """Rejects data for which every reward and every label is the same, or labels that the algorithm does not know.

    Args:
        needing: names of the rewards that need an answer.
        what: name of the dataset, for messages.
        settings: those of the algorithm.
        names: data.labels.
    """
    if needing and not any(isinstance(one, Conversation) and one.answer is not None for one in readings):
        yield Fault(
            "data.answer_key",
            f"must name the field with the answer, which reward.parts.{needing[0]} compares with",
            why=f"no record of {what} has one",
        )
    labelled = isinstance(next(iter(readings), None), Labelling)
    labels = {label for one in readings for label in one.labels} if labelled else set()
    if len(labels) == 1:
        yield Fault(
            "data.path",
            f"has the label {labels.pop()!r:.60} on every record",
            got=what,
            why="there is nothing to distinguish",
            stated=True,
        )
    elif labels and isinstance(settings, ClassificationConfig):
        yield from _class_faults(labels, settings.num_classes, names, what=what)
    elif labels and isinstance(settings, RerankerConfig):
        yield from _relevance_faults(labels, settings.loss, what=what)


def _class_faults(labels: Set[Label], num_classes: int, names: Sequence[str] | None, *, what: str) -> Iterator[Fault]:
    """Rejects labels that are none of the numbers or places in the list of names below `num_classes`."""
    words = list(names or sorted(label for label in labels if isinstance(label, str)))
    numbers = {float(words.index(label)) if isinstance(label, str) else label for label in labels}
    if strange := sorted(number for number in numbers if number < 0 or number != round(number)):
        rule = "must have whole numbers from 0 as labels, or names"
        yield Fault("data.path", rule, got=f"{strange[0]:g} in {what}")
    elif max(numbers) >= num_classes:
        has = f"the classes {', '.join(words)}" if words else f"the label {max(numbers):g}"
        rule = f"must be at least {max(numbers) + 1:g}"
        yield Fault("algorithm.num_classes", rule, got=num_classes, why=f"{what} has {has:.200}")


def _relevance_faults(labels: Set[Label], loss: RerankerLoss, *, what: str) -> Iterator[Fault]:
    """Rejects labels of documents that a reranker's loss does not know."""
    numbers = [label for label in labels if not isinstance(label, str)]
    key, why = "data.path", f"algorithm.loss={loss}"
    if strange := [number for number in numbers if number < 0]:
        yield Fault(key, "must have labels from 0 on", got=f"{min(strange):g} in {what}", why=why)
    elif loss is RerankerLoss.POINTWISE and max(numbers, default=0) > 1:
        got, hint = f"{max(numbers):g} in {what}", "or use algorithm.loss=listwise"
        yield Fault(key, "must have labels from 0 to 1", got=got, why=why, hint=hint)


def template_faults(run: RunConfig, readings: Sequence[Any], *, generation_prompt: bool) -> Iterator[Fault]:
    """Rejects a chat template that fails on the first record, drops the user's text, or ends turns where engines do not
    stop."""
    messages = next((reading.messages for reading in readings[:1]), ())
    # The messages up to the user's last one: the prompt of the assistant's last turn.
    prompt = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not prompt:
        return
    try:
        folder = hub.resolve(run.model)
        tokens = tokenizer.load(folder)
    except (CheckpointError, ConfigError):
        # Reported by the topic of the model.
        return
    try:
        if run.data.chat_template is not None:
            chat_template.give(tokens, run.data.chat_template)
        if unread := list(kwargs_faults(tokens, run.data)):
            yield from unread
            return
        where = f"{run.data.what}: the first record"
        text = render(tokens, prompt, config=run.data, generation_prompt=generation_prompt, where=where).text
        if run.data.chat_template is not None and generation_prompt:
            yield from _stop_faults(run, folder, end_token(tokens, run.data))
    except ConfigError as error:
        yield from error.faults
        return
    except DataError as error:
        yield Fault("data", said=error)
        return
    # The user's own: many templates write the result of a tool as JSON, and so not as it stands in the record.
    said = next((turn["content"].strip() for turn in reversed(prompt) if turn["role"] == "user"), "")
    if said not in text:
        yield Fault(
            "model.path",
            said=f"the chat template of {tokens.name_or_path!r} leaves out the user's message {said!r:.60}",
        )


def _stop_faults(run: RunConfig, folder: Path, end: str) -> Iterator[Fault]:
    """Rejects a chat template that ends turns where engines do not stop."""
    tokens = tokenizer.load(folder)
    stopping = {str(tokens.convert_ids_to_tokens(token)) for token in tokenizer.stop_token_ids(folder, tokens)}
    if not end or end in stopping or end in run.rollout.stop:
        return
    yield Fault(
        "rollout.stop",
        f"must hold {end!r}, with which data.chat_template={run.data.chat_template} ends turns",
        got=run.rollout.stop,
        why=f"engines stop at {', '.join(sorted(stopping)) or 'nothing'}",
        hint=f"set rollout.stop='[\"{end}\"]', or add its id to eos_token_id in {folder}/generation_config.json",
    )


def learnt_kind(algorithm: Algorithm) -> Any:
    """Returns the stream of the data's own responses, or None if no step trains on them."""
    required = algorithm.requirements
    return find_source(required.data) if required.data is not None and required.responses else None
