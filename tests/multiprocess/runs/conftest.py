"""What several of these tests compare with."""

import fcntl
import os
from pathlib import Path

import pytest

from tests.multiprocess.program import ONLINE, run


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run with the settings ONLINE that nobody disturbed: one for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    found = common / "whole"
    with (common / "whole.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_text(str(run(tmp_path_factory.mktemp("run") / "run", ONLINE)))
    return Path(found.read_text())
