"""What several of these tests compare with."""

from pathlib import Path

import pytest

from tests.multiprocess.program import ONLINE, run


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run with the settings ONLINE that nobody disturbed."""
    return run(tmp_path_factory.mktemp("whole") / "run", ONLINE)
