"""Finds out the facts of GPUs, from nvidia-smi and from the files of packages. Imports neither torch nor CUDA."""

import importlib.util
import os
import re
import subprocess
import sysconfig
from contextlib import suppress
from pathlib import Path

from rlframe.tools.doctor.facts import Device, Gpus

TIMEOUT_S = 60
HEADERS = {"cudnn.h": "cudnn", "nccl.h": "nccl"}
"""Headers with which Transformer Engine is built, and the folder of NVIDIA's packages that holds each."""


def gpus() -> Gpus:
    """Returns the facts of the GPUs and their driver."""
    common = {"torch_cuda": torch_cuda(), "headers": headers()}
    try:
        text = _ask("--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return Gpus(**common)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", "") or str(error)
        return Gpus(**common, error=str(said).strip()[:200])
    devices, driver = parsed(text)
    blocked: tuple[str, ...] = ()
    with suppress(OSError, subprocess.SubprocessError):
        blocked = pairs_without_access(_ask("topo", "-p2p", "r")) if len(devices) > 1 else ()
    return Gpus(**common, devices=devices, driver=driver, without_peer_access=blocked)


def parsed(text: str) -> tuple[tuple[Device, ...], str]:
    """Returns the devices of nvidia-smi's lines `name, MiB, capability, driver`, and the driver."""
    rows = [[cell.strip() for cell in line.rsplit(",", 3)] for line in text.splitlines() if line.count(",") >= 3]
    devices = tuple(
        Device(
            name=name,
            memory_gib=round(float(memory) / 1024, 1) if memory.replace(".", "").isdigit() else 0.0,
            capability=tuple(map(int, re.findall(r"\d+", capability))),
        )
        for name, memory, capability, _ in rows
    )
    return devices, rows[0][3] if rows else ""


def pairs_without_access(text: str) -> tuple[str, ...]:
    """Returns the pairs of GPUs, such as `0-1`, that nvidia-smi's matrix of peer access does not call OK."""
    rows = {}
    for line in text.splitlines():
        cells = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        # The first line names the columns, GPU0 GPU1 ...
        if len(cells) > 1 and re.fullmatch(r"GPU\d+", cells[0]) and not cells[1].startswith("GPU"):
            rows[int(cells[0].removeprefix("GPU"))] = cells[1:]
    return tuple(
        f"{one}-{other}"
        for one, cells in rows.items()
        for other, cell in enumerate(cells)
        if other > one and cell not in ("OK", "X")
    )


def torch_cuda() -> str:
    """Returns the release of CUDA that torch is built for, from its file of versions."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    with suppress(OSError):
        text = (Path(found.origin).parent / "version.py").read_text()
        if cuda := re.search(r"""^cuda[^=]*=\s*['"]([\d.]+)""", text, re.MULTILINE):
            return cuda[1]
    return ""


def headers() -> tuple[str, ...]:
    """Returns the headers that a compiler would find, for one of its own paths or for one of pip's packages."""
    named = [os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH")]
    folders = [Path(folder) for folder in ":".join(named).split(":") if folder]
    folders += [Path(folder) for folder in ("/usr/include", "/usr/include/x86_64-linux-gnu", "/usr/local/cuda/include")]
    folders += [
        Path(os.environ[name]) / "include" for name in ("CUDNN_PATH", "CUDNN_HOME", "CUDA_HOME") if os.environ.get(name)
    ]
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    return tuple(
        header
        for header, package in HEADERS.items()
        if any((folder / header).is_file() for folder in (*folders, packages / package / "include"))
    )


def _ask(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
