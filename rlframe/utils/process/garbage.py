"""Python's garbage collection round the start of a process.

The imports of a process make a million objects that stay. Looking through them again and again takes a quarter of the
time of a start, and later a tenth of a second each time that everything is looked through.
"""

import atexit
import gc


def hold() -> None:
    """Suspends the collection of cycles until `release`."""
    gc.disable()


def release() -> None:
    """Resumes the collection, and the first time in a process exempts everything that exists from it: what a program
    made before it is not left over from an earlier run. Does nothing if collection was not suspended."""
    if not gc.isenabled():
        if not gc.get_freeze_count():
            gc.freeze()
            # What is exempted would otherwise outlive the interpreter, which extension modules report as leaks.
            atexit.register(gc.unfreeze)
        gc.enable()
