"""One thread of gloo for all process groups of a rank.

torch 2.11 to 2.13 gives each group a device of its own, whose thread wakes up a hundred times a second whether there is
traffic or not. A rank has some twenty groups: with four ranks on two cores, that takes a tenth of a core and more.
This file can go when a process with ten groups has as many threads as one with two.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def on_one_device(original: Callable[..., None]) -> Callable[..., None]:
    """Returns `ProcessGroupGloo.__init__` for groups that share the device of the first one in their process."""
    devices: dict[int, list[Any]] = {}

    def wrapper(group: Any, *args: Any, timeout: timedelta | None = None) -> None:
        # A forked process has no thread of its parent's.
        shared = devices.get(os.getpid())
        if timeout is None:
            original(group, *args)
        elif shared is None:
            original(group, *args, timeout=timeout)
            devices[os.getpid()] = group.options._devices
        else:
            options = group._Options()
            options._timeout, options._devices = timeout, shared
            original(group, *args, options)

    return wrapper
