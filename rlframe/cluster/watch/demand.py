"""SIGUSR1 to the driver: requests a report of who waits for whom, and an audit of memory."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

ASKING = signal.SIGUSR1
"""Signal that requests a report. Neither Ray 2.60 nor faulthandler uses it in a driver. (Ranks print their stacks on
SIGUSR2.)"""


@contextmanager
def listening() -> Iterator[Callable[[], bool]]:
    """Receives the signal inside the `with` block, also while the main thread hangs in C: Python writes a signal to a
    pipe at once, and calls its handler only when the main thread runs.

    Yields:
        A function that returns whether the signal has arrived since its last call. Outside of the main thread it always
            returns False.
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
        # Other signals are written to the pipe too.
        with suppress(OSError):
            return ASKING in os.read(reader, 4096)
        return False

    try:
        yield asked
    finally:
        signal.set_wakeup_fd(before)
        # A late signal must not end the process.
        signal.signal(ASKING, signal.SIG_IGN if handler is signal.SIG_DFL else handler)
        os.close(reader)
        os.close(writer)
