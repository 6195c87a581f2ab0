"""Finds out the facts of this machine, with the standard library alone."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from rlframe.tools.doctor.facts import GIB, Disk, Facts, Hub, Limit, Ray, System
from rlframe.tools.doctor.gpus import gpus
from rlframe.tools.doctor.stack import PACKAGES

WRITTEN_MIB = 128
"""Amount that is written to measure the disk."""
CONNECT_TIMEOUT_S = 3.0
RAY_PORT = 6379
TIME_ERROR = 5
"""Answer of the kernel for a clock that nothing keeps right."""
TIMEX_BYTES = 512
"""More than the size of the kernel's struct timex."""
OF_ALL_NODES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "VLLM_", "SGLANG_", "NVTE_", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Beginnings of names of variables that nodes must agree on."""
SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD")


def facts(folder: str, *, ask_hub: bool = True) -> Facts:
    """Returns the facts of this machine.

    Args:
        folder: where runs write. It need not exist.
        ask_hub: whether to connect to the hub.
    """
    packages = {name: version for name, version in versions().items() if version is not None}
    return Facts(
        packages=packages,
        gpus=gpus(),
        system=system(),
        disk=disk(folder),
        hub=hub(ask=ask_hub),
        ray=ray(),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(OF_ALL_NODES) and not SECRET.search(name)
        },
    )


def versions() -> dict[str, str | None]:
    """Returns the release of each of PACKAGES. None if a package is not installed."""
    return {one.name: _version((one.name, *one.others)) for one in PACKAGES}


def system() -> System:
    """Returns the facts of the machine and its kernel."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    infiniband = Path("/sys/class/infiniband")
    return System(
        host=socket.gethostname(),
        platform=platform.platform(),
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(pages * page_bytes / GIB, 1),
        shm_gib=round(_bytes_of(Path("/dev/shm")) / GIB, 2),
        limits={
            name: _limit(kind)
            for name, kind in (
                ("nofile", resource.RLIMIT_NOFILE),
                ("memlock", resource.RLIMIT_MEMLOCK),
                ("nproc", resource.RLIMIT_NPROC),
            )
        },
        has_infiniband=infiniband.is_dir() and any(infiniband.iterdir()),
        ephemeral_ports=_ephemeral_ports(),
        is_clock_kept=_is_clock_kept(),
    )


def disk(folder: str) -> Disk:
    """Returns the facts of the disk of a folder, or of its next parent that exists."""
    place = Path(folder).expanduser().absolute()
    while not place.exists():
        place = place.parent
    marks = tuple(sorted(path.name for path in place.glob(".rlframe-doctor-*"))) if place.is_dir() else ()
    known = {"folder": str(place), "free_gib": round(shutil.disk_usage(place).free / GIB, 1), "marks": marks}
    try:
        return Disk(**known, mib_per_s=_write_speed(place))
    except OSError as error:
        return Disk(**known, error=str(error))


def hub(*, ask: bool) -> Hub:
    """Returns the facts of the hub and its cache."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    offline = (os.environ.get("HF_HUB_OFFLINE") or "0").upper() in ("1", "ON", "YES", "TRUE")
    endpoint = _endpoint()
    existing = next(place for place in (cache, *cache.parents) if place.exists())
    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy"))
    asked = bool(ask and endpoint and not offline and not proxied)
    return Hub(
        cache=str(cache),
        is_writable=os.access(existing, os.W_OK),
        is_offline=offline,
        endpoint=endpoint,
        is_asked=asked,
        error=_unreachable(endpoint) if asked else "",
    )


def _endpoint() -> str:
    """Returns the address of the hub. Empty without its package."""
    try:
        from huggingface_hub.constants import ENDPOINT  # noqa: PLC0415 - the other facts do not need it
    except ImportError:
        return ""
    return ENDPOINT


def ray() -> Ray:
    """Returns how Ray is set up."""
    token = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    return Ray(
        address=os.environ.get("RAY_ADDRESS", ""),
        auth_mode=os.environ.get("RAY_AUTH_MODE", ""),
        has_token=bool(os.environ.get("RAY_AUTH_TOKEN")) or Path(token).expanduser().is_file(),
        is_running=not refusal("127.0.0.1", RAY_PORT),
    )


def _version(distributions: Sequence[str]) -> str | None:
    for distribution in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _limit(kind: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
    return Limit(soft=soft, hard=hard)


def _bytes_of(place: Path) -> int:
    with suppress(OSError):
        return shutil.disk_usage(place).total
    return 0


def _ephemeral_ports() -> int:
    with suppress(OSError, ValueError):
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(last) - int(first) + 1
    return 0


def _is_clock_kept() -> bool | None:
    with suppress(OSError, AttributeError):
        # A struct of zeros asks, and sets nothing.
        return ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)) not in (TIME_ERROR, -1)
    return None


def _write_speed(place: Path) -> float:
    """Returns MiB per second."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=place) as file:
        start = time.perf_counter()
        for _ in range(WRITTEN_MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return round(WRITTEN_MIB / (time.perf_counter() - start), 1)


def _unreachable(endpoint: str) -> str:
    """Returns why nothing answers at a URL. Empty if something does."""
    address = urlsplit(endpoint)
    if not address.hostname:
        return "it is no URL"
    return refusal(address.hostname, address.port or (443 if address.scheme == "https" else 80))


def refusal(host: str, port: int) -> str:
    """Returns why nothing answers at a port. Empty if something does."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""
