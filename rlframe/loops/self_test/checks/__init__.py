"""The checks of a self test: a file each, which ends `CHECK = TheCheck`. They only read what was seen."""

import importlib

from rlframe.loops.self_test.finding import Check
from rlframe.utils import registry
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean
from rlframe.utils.outside import load_class

PACKAGE = __name__


def find_checks(*, without: list[str], further: list[str]) -> dict[str, Check]:
    """Returns the checks by name: all of this folder but those in `without`, then those of `further`.

    Raises:
        ConfigError: there is no such check.
    """
    known = registry.names(PACKAGE)
    for name in without:
        if name not in known:
            rule, near = f"must name checks: there are {', '.join(known)}", did_you_mean(name, known)
            raise ConfigError([Fault("self_test.without", rule, got=repr(name), hint=near)])
    found = {name: importlib.import_module(f"{PACKAGE}.{name}").CHECK() for name in known if name not in without}
    for target in further:
        own = load_class(target, base=registry.BASES[PACKAGE], key="self_test.further_checks")
        found[target.rpartition(":")[2]] = own()
    return found
