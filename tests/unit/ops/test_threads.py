"""Threads of torch's operators."""

import pytest
import torch

from rlframe.ops.threads import one_thread


def test_a_block_computes_alone_and_what_follows_does_not() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyError), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
