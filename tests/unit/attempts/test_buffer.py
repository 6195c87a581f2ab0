"""The buffer: how many leases may be open, and which groups are taken."""

import pytest

from rlframe.attempts.account.leases import Lease
from rlframe.attempts.buffer import Buffer
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt

PROMPT = Prompt(id="p", text="", input=ModelInput((1,)))


def lease(ordinal: int, version: int = 0) -> Lease:
    """A lease of the only prompt."""
    return Lease(ordinal=ordinal, prompt=PROMPT, epoch=0, step=1, version=version)


def filled(buffer: Buffer, *versions: int, finished: tuple[int, ...]) -> Buffer:
    """The buffer with a lease of each version, of which some are finished."""
    for ordinal, version in enumerate(versions):
        buffer.add(lease(ordinal, version))
    for ordinal in finished:
        buffer.put(ordinal, lease(ordinal).begin(1))
    return buffer


def taken(buffer: Buffer, version: int) -> list[int] | None:
    """The ordinals that are trained on."""
    found = buffer.take(version)
    return None if found is None else [each.lease.ordinal for each in found]


@pytest.mark.parametrize(("lag", "depth", "most"), [(0, 1, 2), (1, 1, 4), (4, 1, 4), (4, 2, 6), (1, 4, 4)])
def test_as_many_are_opened_as_can_be_trained_in_time_or_as_the_pipeline_is_deep(lag: int, depth: int, most: int):
    assert Buffer(prompts_per_step=2, max_policy_lag=lag, pipeline_depth=depth).room == most


def test_groups_that_are_trained_on_take_room_until_they_are_settled():
    buffer = filled(Buffer(prompts_per_step=2, max_policy_lag=1, pipeline_depth=1), 0, 0, 0, 0, finished=(1, 3))
    assert buffer.room == 0 and taken(buffer, 0) == [1, 3] and buffer.room == 0
    buffer.settle()
    assert buffer.room == 2


def test_the_oldest_are_taken_first_in_the_order_of_their_leases():
    buffer = Buffer(prompts_per_step=2, max_policy_lag=3, pipeline_depth=3)
    filled(buffer, 2, 1, 0, 2, finished=(3, 2, 1, 0))
    assert taken(buffer, 2) == [1, 2]
    assert taken(buffer, 3) == [0, 3]


def test_a_step_waits_for_those_that_would_become_too_old():
    buffer = Buffer(prompts_per_step=2, max_policy_lag=1, pipeline_depth=1)
    filled(buffer, 0, 0, 1, 1, finished=(2, 3))
    assert taken(buffer, 1) is None and not buffer.is_ready(1)
    buffer.put(1, lease(1).begin(1))
    # Lease 0 may not be trained on at version 2.
    assert taken(buffer, 1) is None
    buffer.put(0, lease(0).begin(1))
    assert taken(buffer, 1) == [0, 1]


def test_an_ended_lease_is_not_taken():
    buffer = filled(Buffer(prompts_per_step=1, max_policy_lag=1, pipeline_depth=1), 0, 0, finished=(0, 1))
    assert buffer.drop(0) == lease(0)
    assert taken(buffer, 0) == [1] and buffer.open == buffer.waiting == []
