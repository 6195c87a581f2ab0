"""What all tests of actors share."""

from collections.abc import Iterator

import pytest
import torch

from tests.multiprocess.forks import forked_workers


@pytest.fixture(scope="module", autouse=True)
def quick_workers() -> Iterator[None]:
    """Ray's workers are forked. On a machine with GPUs a worker chooses its own before it imports torch."""
    if torch.cuda.is_available():
        yield
    else:
        with forked_workers():
            yield
