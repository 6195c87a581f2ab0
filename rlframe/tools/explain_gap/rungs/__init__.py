"""The rungs of the ladder: a file each, which ends `RUNG = TheRung()`. They stand in the order of their `place`."""

import importlib
import pkgutil

from rlframe.tools.explain_gap.rung import Rung


def rungs() -> list[Rung]:
    """Returns the rungs, lowest first."""
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return sorted((module.RUNG for module in modules), key=lambda rung: rung.place)
