"""Memory of this process."""

import mmap
import subprocess

import numpy as np

from rlframe.utils.process.memory import MemoryUse, of_role, used

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
    uses = [
        MemoryUse(resident_bytes=3, resident_peak_bytes=5, own_bytes=1),
        MemoryUse(resident_bytes=2, resident_peak_bytes=9, own_bytes=1),
    ]
    assert of_role("policy", uses) == {"memory/policy_current_bytes": 3.0, "memory/policy_peak_bytes": 9.0}
    assert of_role("policy", []) == {}
    on_gpu = MemoryUse(
        resident_bytes=3, resident_peak_bytes=5, own_bytes=1, tensor_bytes=10, reserved_bytes=20, reserved_peak_bytes=30
    )
    assert of_role("policy", [on_gpu]) == {"memory/policy_current_bytes": 20.0, "memory/policy_peak_bytes": 30.0}


def test_what_others_map_too_is_not_the_processes_own() -> None:
    before = used()
    shared = mmap.mmap(-1, 32 * MIB)
    shared.write(b"x" * (32 * MIB))
    during = used()
    assert during.resident_bytes - before.resident_bytes > 24 * MIB
    assert during.own_bytes - before.own_bytes < 24 * MIB
    shared.close()


def test_a_child_counts_where_that_is_asked() -> None:
    child = subprocess.Popen(["sleep", "100"])
    try:
        assert used(with_children=True).own_bytes > used().own_bytes
    finally:
        child.kill()
        child.wait()
