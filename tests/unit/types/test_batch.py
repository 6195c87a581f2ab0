"""Sequences, Batch and TrainBatch: selecting and numbering."""

import pickle
from dataclasses import fields
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlframe.types.batch import Axis, Batch, Sequences, TrainBatch
from rlframe.types.supervised import Contrasted, Examples, Labelled, Preferences, Unpaired
from rlframe.utils.errors import RlframeError

AXES = {Axis.TOKEN: "T", Axis.SEQUENCE: "R"}


def example() -> TrainBatch:
    """Three rollouts of 2, 3 and 1 tokens whose every value says where it came from."""
    tokens = torch.arange(6.0)
    return TrainBatch(
        token_ids=torch.tensor([10, 11, 20, 21, 22, 30]),
        lengths=torch.tensor([2, 3, 1]),
        loss_mask=torch.tensor([False, True, False, True, True, False]),
        rollout_logprobs=-tokens,
        group=torch.tensor([0, 0, 1]),
        rewards=torch.tensor([0.1, 0.2, 0.3]),
        versions=torch.arange(4, 10),
        reference_logprobs=-tokens - 0.5,
        advantages=tokens + 100,
    )


def test_sequence_index_numbers_the_tokens() -> None:
    assert example().sequence_index().tolist() == [0, 0, 1, 1, 1, 2]
    assert (example().num_sequences, example().num_tokens) == (3, 6)


def test_select_takes_every_field_along() -> None:
    picked = example().select([2, 0])
    assert picked.token_ids.tolist() == [30, 10, 11]
    assert picked.lengths.tolist() == [1, 2]
    assert picked.loss_mask.tolist() == [False, False, True]
    assert picked.rollout_logprobs.tolist() == [-5, 0, -1]
    assert picked.group.tolist() == [1, 0]
    torch.testing.assert_close(picked.rewards, torch.tensor([0.3, 0.1]))
    assert picked.versions.tolist() == [9, 4, 5]
    assert picked.reference_logprobs is not None and picked.reference_logprobs.tolist() == [-5.5, -0.5, -1.5]
    assert picked.advantages.tolist() == [105, 100, 101]
    assert picked.old_logprobs is None and picked.values is None
    assert isinstance(picked, TrainBatch)


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 3), (0, 1), (2, 2)])
def test_a_part_is_the_sequences_between_and_no_copy(start: int, stop: int) -> None:
    batch = example()
    part, same = batch.part(start, stop), batch.select(list(range(start, stop)))
    for field in fields(batch):
        one, other = getattr(part, field.name), getattr(same, field.name)
        assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other)), field.name
    batch.advantages.zero_()
    assert not part.advantages.any()


def test_nothing_selected_is_an_empty_batch_of_the_same_types() -> None:
    batch, empty = example(), example().select([])
    assert (empty.num_sequences, empty.num_tokens) == (0, 0)
    for field in fields(batch):
        if (value := getattr(batch, field.name)) is not None:
            assert getattr(empty, field.name).dtype == value.dtype, field.name
            assert getattr(empty, field.name).numel() == 0, field.name


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_selecting_twice_undoes_a_permutation(lengths: list[int], random) -> None:  # noqa: ANN001
    order = list(range(len(lengths)))
    random.shuffle(order)
    total = sum(lengths)
    batch = Sequences(
        token_ids=torch.arange(total),
        lengths=torch.tensor(lengths),
        loss_mask=torch.arange(total) % 2 == 1,
        teacher_top_ids=torch.arange(total * 2).view(total, 2).int(),
        teacher_top_logprobs=-torch.arange(total * 3.0).view(total, 3),
        routes=torch.arange(total * 6).view(total, 2, 3).to(torch.uint8),
    )
    back = batch.select(order).select([order.index(i) for i in range(len(order))])
    for field in fields(batch):
        one, other = getattr(back, field.name), getattr(batch, field.name)
        assert (one is None and other is None) or torch.equal(one, other), field.name


@pytest.mark.parametrize("kind", [TrainBatch, Examples, Preferences, Unpaired, Labelled, Contrasted])
def test_every_field_says_its_axis(kind: type[Sequences]) -> None:
    for field in fields(kind):
        shapes = [getattr(part, "dim_str", None) for part in get_args(field.type) or (field.type,)]
        first = {shape.split()[0] for shape in shapes if shape}
        assert not first or first == {AXES[field.metadata["axis"]]}, field.name


def test_with_advantages_keeps_everything_else() -> None:
    train = example()
    batch = Batch(**{field.name: getattr(train, field.name) for field in fields(Batch)})
    again = batch.with_advantages(train.advantages)
    assert all(getattr(again, field.name) is getattr(train, field.name) for field in fields(train))


@pytest.mark.parametrize(
    ("advantages", "got"),
    [
        (torch.zeros(5), r"of shape \[6\], one for each token of the batch, got \[5\] of torch.float32"),
        (torch.zeros(6, 1), r"got \[6, 1\] of torch.float32"),
        (torch.zeros(6, dtype=torch.int64), r"must be floating-point numbers .* got \[6\] of torch.int64"),
        (torch.tensor([0.0, float("nan"), 0.0, float("inf"), 0.0, 0.0]), "must be finite, got 2 that are not"),
    ],
)
def test_what_is_no_number_for_each_token_is_no_advantage(advantages: torch.Tensor, got: str) -> None:
    train = example()
    batch = Batch(**{field.name: getattr(train, field.name) for field in fields(Batch)})
    with pytest.raises(RlframeError, match=got):
        batch.with_advantages(advantages)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_batch_is_pickled_beside_the_message_and_comes_back_on_memory_of_its_own(contiguous: bool) -> None:
    batch = example()
    batch.reference_logprobs = torch.arange(2.0 * batch.num_tokens)[::2].bfloat16()
    if contiguous:
        batch.reference_logprobs = batch.reference_logprobs.contiguous()
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    tensors = [value for field in fields(batch) if isinstance(value := getattr(batch, field.name), torch.Tensor)]
    assert [buffer.raw().nbytes for buffer in buffers] == [each.numel() * each.element_size() for each in tensors]
    assert batch.advantages.numpy().tobytes() not in message
    # As Ray hands them out: one memory for all readers, not to be written.
    again = pickle.loads(message, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert type(again) is type(batch)
    for field in fields(batch):
        before, after = getattr(batch, field.name), getattr(again, field.name)
        if isinstance(before, torch.Tensor):
            assert before.dtype == after.dtype and torch.equal(before, after), field.name
            after.zero_()
        else:
            assert before == after, field.name
