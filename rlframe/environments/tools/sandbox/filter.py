"""The system calls that a program in a sandbox cannot make, as a program of the kernel's seccomp filter.

Namespaces and limits leave ways out that only this closes: memory that no limit counts (`memfd_create`, `shmget`),
namespaces of one's own with all rights in them (`unshare`), sockets that network namespaces do not hold (vsock), and
large parts of the kernel that no code of a policy needs.
"""

import os
import platform
import struct

INSTRUCTION = struct.Struct("=HBBI")
"""`struct sock_filter` of <linux/filter.h>: operation, jump if true, jump if false, operand."""
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data` of <linux/seccomp.h>."""
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NOT_PERMITTED, NO_SUCH_CALL = 1, 38
"""EPERM, ENOSYS."""
NAMESPACES = 0x7E020000
"""The flags of clone that make namespaces: of mounts, cgroups, names, ipc, users, processes, network."""
LOCAL_SOCKET = 1
"""AF_UNIX."""
X32 = 0x40000000
"""The first number of x86's third set of calls, which would go round the list."""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Memory and files that no limit counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Parts of the kernel with a history.
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "vmsplice": (278, 75),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "acct": (163, 89),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "personality": (135, 92),
}
"""Calls that are not permitted, with their numbers on x86_64 and on aarch64."""
CLONE, CLONE3, SOCKET, SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)


def machine() -> str | None:
    """Returns the name of this machine's set of calls, or None where there is no list for it."""
    return name if (name := platform.machine()) in MACHINES else None


def program(name: str) -> bytes:
    """Returns the filter for a machine."""
    column = list(MACHINES).index(name)
    number = {"clone": CLONE, "clone3": CLONE3, "socket": SOCKET, "socketpair": SOCKETPAIR}
    lines = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, MACHINES[name]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    lines += _if((AT_LEAST, X32), NO_SUCH_CALL) if name == "x86_64" else []
    for refused in REFUSED.values():
        if (value := refused[column]) is not None:
            lines += _if((EQUAL, value), NOT_PERMITTED)
    # Its flags lie in memory, which a filter cannot read. C libraries go on with clone.
    lines += _if((EQUAL, number["clone3"][column]), NO_SUCH_CALL)
    namespaces = _if((ANY_BIT, NAMESPACES), NOT_PERMITTED)
    lines += _only(number["clone"][column], [(LOAD, 0, 0, FIRST_ARGUMENT), *namespaces, (RETURN, 0, 0, ALLOW)])
    other = [(EQUAL, 1, 0, LOCAL_SOCKET), (RETURN, 0, 0, REFUSE | NOT_PERMITTED), (RETURN, 0, 0, ALLOW)]
    for call in ("socket", "socketpair"):
        lines += _only(number[call][column], [(LOAD, 0, 0, FIRST_ARGUMENT), *other])
    return b"".join(INSTRUCTION.pack(*line) for line in [*lines, (RETURN, 0, 0, ALLOW)])


def opened(filter_program: bytes) -> int:
    """Returns a descriptor from which a filter can be read once."""
    reads, writes = os.pipe()
    # Less than the pipe holds.
    os.write(writes, filter_program)
    os.close(writes)
    return reads


def _if(test: tuple[int, int], error: int) -> list[tuple[int, int, int, int]]:
    """Returns lines that refuse a call for which a test holds."""
    operation, operand = test
    return [(operation, 0, 1, operand), (RETURN, 0, 0, REFUSE | error)]


def _only(call: int, lines: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Returns lines that are for one call."""
    return [(EQUAL, 0, len(lines), call), *lines]
