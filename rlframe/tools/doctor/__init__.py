"""Reports what this machine, or every node of a Ray cluster, offers to rlframe, and the commands that mend it:
`python -m rlframe.tools.doctor`.

`stack` is the table of releases that go together, `facts` what is known of a machine, `gather` finds it out, `checks`
judge it, and `nodes` compares machines. Only `cluster` needs more than the standard library.
"""

from rlframe.tools.doctor.gather import versions
from rlframe.tools.doctor.program import main

__all__ = ["main", "versions"]
