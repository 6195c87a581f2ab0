"""The state of Hydra, of which a process has one: the order in which it looks for YAML files, in a user's own folder
before the package's, and the program whose it is."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

MAIN = SearchPathQuery(provider="main")
"""The package's folder in Hydra's search path."""
COMPOSING = threading.RLock()
"""Held while a configuration is composed outside of Hydra's own programs."""


class OwnFirst(SearchPathPlugin):
    """Hydra's plugin that puts folders before the package's. Hydra itself puts that of `--config-dir` behind it."""

    folders: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Adds the folders. Hydra calls it when it makes a search path."""
        for folder in self.folders:
            search_path.prepend(provider="own", path=f"file://{folder}", anchor=MAIN)


@contextmanager
def searched(folders: Sequence[Path]) -> Iterator[None]:
    """Has Hydra look into `folders` first inside the `with` block. The last of them is the package's, where it looks
    anyway."""
    Plugins.instance().register(OwnFirst)
    before, OwnFirst.folders = OwnFirst.folders, folders[:-1]
    try:
        yield
    finally:
        OwnFirst.folders = before


@contextmanager
def lent() -> Iterator[None]:
    """Has Hydra to itself inside the `with` block, also in a program that is one of Hydra's own, or has threads."""
    with COMPOSING:
        before = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            GlobalHydra.instance().hydra = before
