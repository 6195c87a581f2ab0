"""Writes the page of a run, or one that compares several: `python -m rlframe.tools.report OUTPUT [OUTPUT ...]`.

The page of one run is report.html in its folder, that of several is report.html in the present folder. Works on a
finished run, on one that was killed, and on one that is running. Ends with status 2 if a folder is not that of a run,
and with 1 if the page cannot be written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlframe.loops.report.files import settings_of
from rlframe.loops.report.page import REPORT, write_page
from rlframe.utils.arguments import Parser, run_tool
from rlframe.utils.errors import OutputError, RlframeError
from rlframe.utils.text import printable

NO_RUN = 2
"""Exit status where a folder is not that of a run, as of tools.audit and tools.rollouts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page of the runs on the command line. Returns the exit status."""
    parser = Parser(prog="python -m rlframe.tools.report", description=__doc__)
    parser.add_argument("outputs", nargs="+", type=Path, metavar="OUTPUT", help="a run's folder")
    parser.add_argument("--to", type=Path, metavar="FILE", help="the file to write")
    options = parser.parse_args(arguments)
    outputs: list[Path] = options.outputs
    to: Path = options.to or (outputs[0] / REPORT if len(outputs) == 1 else Path(REPORT))
    try:
        for output in outputs:
            settings_of(output)
    except OutputError as error:
        print(printable(str(error)), file=sys.stderr)
        return NO_RUN
    try:
        size = write_page(outputs, to)
    except RlframeError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    print(printable(f"{to} ({size / 1e6:.1f} MB)"))
    return 0


if __name__ == "__main__":
    run_tool(main)
