"""Memory, limits of processes, disk, ports and the clock."""

from collections.abc import Iterator

from rlframe.tools.doctor.facts import Facts, Finding, warning

LEAST_SHM_GIB = 1.0
"""Size of /dev/shm below which runs fail. Docker gives 0.06 GiB."""
SHM_SHARE, MOST_SHM_GIB = 0.3, 200.0
"""Share of the memory, and its greatest size, that Ray's object store takes of /dev/shm; it falls back to the disk."""
LEAST_SOFT = {"nofile": 65536, "nproc": 16384}
"""Least limits: each GPU takes dozens of processes, each with many threads and connections."""
FAILING = {"nofile": 4096, "nproc": 1024}
"""Limits below which runs fail."""
LETTERS = {"nofile": "n", "nproc": "u", "memlock": "l"}
"""Options of `ulimit`."""
LEAST_FREE_GIB, FAILING_FREE_GIB = 50.0, 2.0
LEAST_MIB_PER_S = 200.0
"""Speed of the disk below which checkpoints are slow: 16 GB in more than a minute."""
LEAST_PORTS = 10_000


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Finds a /dev/shm that is too small for Ray's objects, NCCL and engines."""
    size = facts.system.shm_gib
    wanted = min(SHM_SHARE * facts.system.memory_gib, MOST_SHM_GIB)
    if size >= wanted:
        return
    mend = f"sudo mount -o remount,size={max(1, round(wanted))}G /dev/shm"
    container = f"\ndocker run --shm-size={max(1, round(wanted))}g  # for a container"
    what = f"/dev/shm has {size:g} GiB, and Ray's objects want {wanted:.0f} GiB"
    if size < LEAST_SHM_GIB:
        yield Finding(what=f"{what}: NCCL and engines fail with so little", mend=mend + container)
    else:
        yield warning(f"{what}: the rest goes to the disk", mend + container)


def limits(facts: Facts) -> Iterator[Finding]:
    """Finds limits of processes that are too low."""
    for name, least in LEAST_SOFT.items():
        limit = facts.system.limits.get(name)
        if limit is None or limit.soft is None or limit.soft >= least:
            continue
        raised = limit.hard is None or limit.hard >= least
        mend = f"ulimit -{LETTERS[name]} {least}"
        if not raised:
            mend = f"echo '* - {name} {least}' | sudo tee -a /etc/security/limits.conf  # then log in again"
            mend += f"\ndocker run --ulimit {name}={least}  # for a container"
        yield Finding(
            what=f"the limit {name} is {limit.soft}, and a node of GPUs needs {least}",
            mend=mend,
            is_problem=limit.soft < FAILING[name],
        )
    locked = facts.system.limits.get("memlock")
    if locked and locked.soft is not None and facts.system.has_infiniband:
        yield Finding(
            what=f"the limit memlock is {locked.soft} bytes, and InfiniBand registers memory beyond it",
            mend="ulimit -l unlimited\ndocker run --ulimit memlock=-1  # for a container",
        )


def disk(facts: Facts) -> Iterator[Finding]:
    """Finds a disk that is full, slow, or cannot be written."""
    found = facts.disk
    if found.error:
        mend = "python -m rlframe.tools.doctor --folder FOLDER  # of another disk; runs take it as output=FOLDER"
        yield Finding(what=f"{found.folder} cannot be written: {found.error}", mend=mend)
    if found.free_gib < LEAST_FREE_GIB:
        yield Finding(
            what=f"{found.folder} has {found.free_gib:g} GiB left; a checkpoint of 8 billion parameters takes 110 GiB",
            mend=f"du -xh -d 2 {found.folder} | sort -h | tail  # or name another disk by output=FOLDER",
            is_problem=found.free_gib < FAILING_FREE_GIB,
        )
    if found.mib_per_s is not None and found.mib_per_s < LEAST_MIB_PER_S:
        yield warning(
            f"{found.folder} is written with {found.mib_per_s:g} MiB/s, so that 16 GB take "
            f"{16e9 / 2**20 / found.mib_per_s:.0f} s",
            "python -m rlframe.main --config-name NAME checkpoint.every_steps=200  # or output=FOLDER elsewhere",
        )


def ports(facts: Facts) -> Iterator[Finding]:
    """Finds too few ports for the connections of Ray, NCCL and engines."""
    count = facts.system.ephemeral_ports
    if 0 < count < LEAST_PORTS:
        yield warning(
            f"the kernel gives out {count} ports, and a large run takes thousands",
            "sudo sysctl -w net.ipv4.ip_local_port_range='20000 60999'",
        )


def clock(facts: Facts) -> Iterator[Finding]:
    """Finds a clock that nothing keeps right."""
    if facts.system.is_clock_kept is False:
        yield warning(
            "nothing keeps this machine's clock right; nodes of a cluster compare times",
            "sudo timedatectl set-ntp true",
        )


CHECKS = (shared_memory, limits, disk, ports, clock)
