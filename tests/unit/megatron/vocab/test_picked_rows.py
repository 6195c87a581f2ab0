"""An output layer that is given some rows only computes these, and the others have no gradient."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rlframe.megatron.vocab.picked_rows import PickedRows


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_only_the_rows_that_are_picked_are_computed_and_have_gradients(alone: dist.ProcessGroup) -> None:
    layer = torch.nn.Linear(3, 5, bias=False)
    layer.tp_group = alone
    picked = PickedRows(layer)
    states = torch.randn(4, 1, 3, requires_grad=True)
    whole = layer(states)
    with picked.of(torch.tensor([3, 1])):
        some = layer(states)
    assert torch.equal(some, whole[[3, 1]])
    (some * torch.arange(10.0).view(2, 1, 5)).sum().backward()
    expected = torch.zeros(4, 1, 5).index_copy_(0, torch.tensor([3, 1]), torch.arange(10.0).view(2, 1, 5))
    torch.testing.assert_close(states.grad, expected @ layer.weight.detach())
    # Behind it, and with None, all.
    assert torch.equal(layer(states), whole)
    with picked.of(None):
        assert torch.equal(layer(states), whole)
