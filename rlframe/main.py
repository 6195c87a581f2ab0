"""The entry point: `rlframe --config-name NAME key=value ...`, or `python -m rlframe.main`. It imports nothing heavy,
so that a start is told from its first moment; `rlframe.launch` does the rest."""

import sys
from collections.abc import Sequence

from rlframe.utils.process import age, telling  # noqa: F401 - age notes when the program began

NO_RUN = {"--help", "-h", "--shell_completion", "-sc", "--cfg", "-c", "--info", "-i", "--version"}
"""Options with which nothing is run."""


def program() -> None:
    """Runs `main`, and leaves soon after it. It is the console script `rlframe`."""
    try:
        main()
    finally:
        from rlframe.cluster.watch.leaving import leave_soon  # noqa: PLC0415 - as in main

        leave_soon()


def main() -> None:
    """Runs the program and exits with 0 after a finished run, 2 for an error that the user can fix before the run
    starts, 1 for an error during the run, 143 and 130 for a run ended by SIGTERM or Ctrl-C."""
    if asks_for_run(sys.argv[1:]):
        telling.begin()
    try:
        from rlframe import launch  # noqa: PLC0415 - it is told what is being imported

        launch.main()
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C before the run began\n")
        sys.exit(130)
    finally:
        telling.end()


def asks_for_run(arguments: Sequence[str]) -> bool:
    """Returns whether the arguments are those of a run, not of a tool or a question."""
    first = arguments[0] if arguments else ""
    names_tool = first and not first.startswith(("-", "~")) and "=" not in first
    return not names_tool and not any(word.partition("=")[0] in NO_RUN for word in arguments)


if __name__ == "__main__":
    program()
