"""Objects that travel field by field arrive as they were sent."""

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlframe.types.input import ModelInput
from rlframe.types.packed import Packed
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, SamplingParams

# Tasks and news are sent in tests/unit/attempts/test_runner.py, which `make check` has room for.
pytestmark = pytest.mark.later


def through(objects: list[Any]) -> list[Any]:
    """Returns what another process would get."""
    return pickle.loads(pickle.dumps(Packed(objects), protocol=5)).objects()


def group(name: str, size: int, *, answered: bool) -> Group:
    """A group of attempts with or without responses of 1, 2, ... tokens."""
    prompt = Prompt(id=name, text="2+3=", input=ModelInput((5, 6, 7)), answer="5", fields={"name": name})
    made = Group.begin(f"1.{name}", prompt, size)
    for length, rollout in enumerate(made.rollouts, start=1) if answered else ():
        values = np.arange(length)
        rollout.append(
            Completion(token_ids=values, logprobs=-values / 8, versions=values, finish_reason=FinishReason.STOP)
        )
        rollout.text, rollout.reward, rollout.reward_parts = f"{length}", length / 2, {"exact": length / 2}
    return made


def test_groups_arrive_whole_and_as_new_objects() -> None:
    sent = [group("a", 3, answered=True), group("b", 1, answered=True), group("c", 2, answered=False)]
    sent[0].rollouts[1].routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    sent[0].rollouts[2].token_rewards = np.ones(6, np.float32)
    found = through(sent)
    assert through([]) == []
    assert found == sent and all(mine is not theirs for mine, theirs in zip(found, sent, strict=True))
    first, other = found[0].rollouts[0], found[0].rollouts[1]
    assert first.rollout_logprobs.dtype == np.float32 and first.loss_mask.dtype == bool
    # What was an object of each attempt's own still is, and what they shared they share.
    assert first.messages is not other.messages and first.prompt is other.prompt
    first.messages.append({"role": "user", "content": "?"})
    assert other.messages == []
    assert found[2].rollouts[0].loss_mask is found[2].rollouts[1].loss_mask


def test_arrays_of_many_objects_travel_as_one() -> None:
    buffers: list[Any] = []
    requests = [
        GenerationRequest(input=ModelInput(range(3 + index)), sampling=SamplingParams(), seed=index)
        for index in range(100)
    ]
    message = pickle.dumps(Packed(requests), protocol=5, buffer_callback=buffers.append)
    # The tokens and their lengths.
    assert len(buffers) == 2
    assert pickle.loads(message, buffers=buffers).objects() == requests


@dataclass(slots=True)
class Mixed:
    """Fields of every kind."""

    value: Any
    own: list[int] = field(default_factory=list)


class Remembering(Mixed):
    """More than its fields."""


@dataclass(slots=True)
class Counted:
    """An object that pickles itself in its own way."""

    number: int

    def __reduce__(self) -> Any:
        return Counted, (self.number + 1,)


def test_what_is_more_than_its_fields_travels_by_pickle() -> None:
    sent = [Remembering(1), Remembering(2)]
    sent[1].note = "kept"
    assert through(sent)[1].note == "kept"
    assert [each.number for each in through([Counted(1), Counted(2)])] == [2, 3]


def test_what_is_not_alike_travels_as_it_is() -> None:
    shared = [1, 2]
    arrays = [np.zeros((2, 2)), np.arange(3), np.arange(3.0), np.zeros(0)]
    values = [None, 1, "text", ModelInput((1,)), Mixed(3), (), [Mixed(4), Mixed(5)], (Mixed(6),), [Mixed(7), 8]]
    for value in values:
        (found,) = through([Mixed(value)])
        assert found == Mixed(value) and type(found.value) is type(value)
    mixed = [found.value for found in through([Mixed(value) for value in values])]
    assert mixed == values
    for sent, found in zip(arrays, through([Mixed(array) for array in arrays]), strict=True):
        assert np.array_equal(sent, found.value) and sent.dtype == found.value.dtype
    first, second = through([Mixed(1, own=shared), Mixed(2, own=shared)])
    assert first.own is second.own == shared
