"""Collection round a start, in a process of its own: it concerns everything that exists."""

import subprocess
import sys

PROGRAM = """
import gc
from rlframe.utils.process import garbage

garbage.release()
assert gc.isenabled() and not gc.get_freeze_count(), "nothing was suspended"
garbage.hold()
assert not gc.isenabled()
garbage.release()
frozen = gc.get_freeze_count()
assert gc.isenabled() and frozen > 1000
garbage.hold()
left_over = [[] for _ in range(100)]
garbage.release()
assert gc.isenabled() and gc.get_freeze_count() == frozen, "a second run's start exempts nothing that a first one left"
"""


def test_a_start_is_exempt_from_collection_and_what_follows_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
