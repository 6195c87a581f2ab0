"""Memory of this process."""

import numpy as np

from rlframe.utils.memory import MemoryUse, of_role, used

MIB = 1 << 20


def test_memory_that_is_used_is_seen_and_its_peak_stays() -> None:
    before = used()
    held = np.ones(64 * MIB, dtype=np.uint8)
    during = used()
    assert held[-1] == 1 and during.current_bytes - before.current_bytes > 48 * MIB
    del held
    after = used()
    assert during.current_bytes - after.current_bytes > 48 * MIB
    # The kernel counts pages by thread and adds them up now and then.
    assert after.peak_bytes > during.current_bytes - 4 * MIB


def test_a_role_uses_what_its_greediest_process_uses() -> None:
    uses = [MemoryUse(current_bytes=3, peak_bytes=5), MemoryUse(current_bytes=2, peak_bytes=9)]
    assert of_role("policy", uses) == {"memory/policy_current_bytes": 3.0, "memory/policy_peak_bytes": 9.0}
    assert of_role("policy", []) == {}
