"""SIGUSR1 to the driver: a person asks who waits for what, and whether memory still holds what it should."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

ASKING = signal.SIGUSR1
"""Neither Ray 2.60 nor faulthandler takes it in a driver. (Ranks print their stacks on SIGUSR2.)"""


@contextmanager
def listening() -> Iterator[Callable[[], bool]]:
    """Hears the signal inside the `with` block, also while the main thread hangs in C: Python notes a signal in a pipe
    at once, and calls its handler when that thread has a turn.

    Yields:
        Whether the signal has come since the last call. Never, where this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    handler = signal.signal(ASKING, lambda *_: None)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def asked() -> bool:
        # Other signals are noted there too.
        with suppress(OSError):
            return ASKING in os.read(reader, 4096)
        return False

    try:
        yield asked
    finally:
        signal.set_wakeup_fd(before)
        # One that comes too late must not end the process.
        signal.signal(ASKING, signal.SIG_IGN if handler is signal.SIG_DFL else handler)
        os.close(reader)
        os.close(writer)
