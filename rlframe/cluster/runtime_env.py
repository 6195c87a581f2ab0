"""Settings of the workers' environment, by Ray's names. Imports no ray."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from packaging.requirements import InvalidRequirement, Requirement

from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import SettingError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OURS = {
    "CUDA_VISIBLE_DEVICES": "the devices of each worker",
    "OMP_NUM_THREADS": "the cores of the node",
    "TOKENIZERS_PARALLELISM": "the processes of the run",
    "PYTHONWARNINGS": "the logs of the workers",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "the devices of each worker",
    "TORCH_FR_BUFFER_SIZE": "the record of collectives",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "the record of collectives",
}
"""Variables that rlframe sets for its workers in every run, and what decides their values."""


@dataclass(kw_only=True, slots=True)
class RuntimeEnvConfig:
    """The runtime environment, as Ray calls it, of the process of every worker on every node.

    A worker on another node has the environment of `ray start` there, not that of the driver.
    """

    env_vars: Annotated[dict[str, str | int | float], Range(-(10**18), 10**18)] = field(default_factory=dict)
    """Environment variables, such as NCCL_SOCKET_IFNAME or HF_HOME. Values whose names mark them as secret are hidden
    in the run's files."""
    working_dir: Annotated[str | None, PathText()] = None
    """Folder of this machine that is copied to every node, where workers start and import from. null copies nothing."""
    pip: list[str] = field(default_factory=list)
    """Requirements that each node installs for the workers, such as `sympy==1.14`."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in self.env_vars:
            _check_name(name)
        if self.working_dir is not None and not Path(self.working_dir).expanduser().is_dir():
            raise SettingError("working_dir", "must be a folder of this machine", got=self.working_dir)
        for requirement in self.pip:
            try:
                Requirement(requirement)
            except InvalidRequirement as error:
                rule = "must list requirements such as sympy==1.14"
                raise SettingError("pip", rule, got=requirement, why=str(error).partition("\n")[0]) from error

    def for_ray(self) -> dict[str, Any]:
        """Returns the `runtime_env` of `ray.init`, with what was set only."""
        folder = self.working_dir and str(Path(self.working_dir).expanduser().absolute())
        variables = {name: str(value) for name, value in self.env_vars.items()}
        wanted = {"env_vars": variables, "working_dir": folder, "pip": self.pip}
        return {name: value for name, value in wanted.items() if value}

    @contextmanager
    def here(self) -> Iterator[None]:
        """Gives what this process starts inside the `with` block the variables and the modules of the folder that
        workers have, so that a trial of users' code is one of what runs there. What `pip` brings is only there."""
        environment, path = dict(os.environ), list(sys.path)
        os.environ |= {name: str(value) for name, value in self.env_vars.items()}
        if self.working_dir:
            sys.path.insert(0, str(Path(self.working_dir).expanduser().absolute()))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ |= environment
            sys.path[:] = path


def _check_name(name: str) -> None:
    """Refuses a name that is none, and one that rlframe sets itself."""
    if not NAME.fullmatch(name):
        raise SettingError("env_vars", "must have names of letters, digits and _", got=name)
    if decided := OURS.get(name):
        raise SettingError(
            f"env_vars.{name}", "is set by rlframe for each worker", why=f"it follows from {decided}", hint="remove it"
        )
