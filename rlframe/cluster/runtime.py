"""Ray: joined when an address is given, started on this machine otherwise, and gone again after the run."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.watch.reach import refusal
from rlframe.utils.errors import ConfigError

logger = logging.getLogger(__name__)


@contextmanager
def running(config: ClusterConfig, *, num_devices: int) -> Iterator[None]:
    """Ray inside the `with` block. A Ray that was started here ends with the block; a joined one goes on.

    Args:
        num_devices: CPU slots a local Ray must offer; on a laptop there may be more ranks than cores. It has one for
            each core this process may use, too: as many workers as slots are started ahead.

    Raises:
        ConfigError: there is no cluster at the address.
    """
    # Ray would otherwise hide the accelerators from actors that ask for none of them, with a warning on each start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    restore_handlers = keep_handlers()
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address:
        if reason := refusal(address):
            raise ConfigError(
                [f"cluster.address: nothing listens at {address!r} ({reason}); start Ray there with `ray start --head`"]
            )
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ConfigError(
                [
                    f"cluster.address: no Ray cluster answers at {address!r} ({error}); start one with "
                    "`ray start --head`, or set RAY_AUTH_MODE=token if the one that is there asks for a token"
                ]
            ) from error
    else:
        ray.init(
            address="local",
            num_cpus=max(num_devices, len(os.sched_getaffinity(0))),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    restore_handlers()
    try:
        yield
    finally:
        ray.shutdown()


def keep_handlers() -> Callable[[], None]:
    """Returns what puts this process's handlers of SIGTERM and SIGINT back. Ray 2.60 takes SIGTERM for itself when it
    starts, and ends the process with a crash dump; how a run ends is its own to decide."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)

    return restore
