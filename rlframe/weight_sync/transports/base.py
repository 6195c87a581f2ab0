"""What a transport is."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlframe.utils import registry
from rlframe.utils.errors import ConfigError
from rlframe.weight_sync.plan import Copy

PACKAGE = "rlframe.weight_sync.transports"


class Transport(ABC):
    """The destination's end: reads the memory of source ranks. A file of this folder ends `TRANSPORT = TheClass`."""

    @staticmethod
    @abstractmethod
    def share(parameters: Mapping[str, Tensor]) -> Any:
        """Source side: makes the parameters readable by other processes, and returns the picklable way in."""

    @abstractmethod
    def connect(self, parameters: Mapping[str, Tensor], copies: Sequence[Copy], memories: Sequence[Any]) -> None:
        """Prepares `copies` into `parameters`, given the memory of every source rank."""

    @abstractmethod
    def pull(self) -> None:
        """Carries out the copies; when it returns they have arrived."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the sources' memory."""


def find_transport(name: str) -> type[Transport]:
    """The transport of file `name`.

    Raises:
        ConfigError: there is no such file.
    """
    if name not in registry.names(PACKAGE):
        raise ConfigError([f"transport must be one of {', '.join(registry.names(PACKAGE))}, got {name!r}"])
    return importlib.import_module(f"{PACKAGE}.{name}").TRANSPORT
