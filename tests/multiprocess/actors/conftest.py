"""What all tests of actors share."""

from collections.abc import Iterator

import pytest

from tests.multiprocess.forks import forked_workers


@pytest.fixture(scope="module", autouse=True)
def quick_workers() -> Iterator[None]:
    """Ray's workers are forked."""
    with forked_workers():
        yield
