"""The command lines of tools."""

import argparse
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from rlframe.utils.nearest import did_you_mean

CHOICE = re.compile(r"invalid choice: '(?P<given>.*)' \(choose from (?P<known>.*)\)", re.DOTALL)
NOT_READ = 128 + signal.SIGPIPE
"""Exit status where nobody reads the output any more, as of other programs."""


def run_tool(main: Callable[[], int | None]) -> NoReturn:
    """Runs a tool, and exits with the status that it returns. Output that nobody reads any more, as behind `| head`,
    ends it without a word."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_not_read():
            raise
        # What is left to write would be an error again at the end of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = NOT_READ
    sys.exit(status)


def _is_not_read() -> bool:
    """Returns whether the output is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest option or choice after a misspelt one."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """See `argparse.ArgumentParser`. Refuses unknown options itself, because a command's parser knows its options
        better than the one above it."""
        self._given = list(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(self._given, namespace)
        if unknown := [word for word in rest if word.startswith("--")]:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the fault, with the nearest names, and exits with status 2."""
        hints = dict.fromkeys(self._hints(message))
        super().error("; ".join([message, *hints]))

    def _hints(self, message: str) -> Iterator[str]:
        if choice := CHOICE.search(message):
            known = re.findall(r"[^\s,']+", choice["known"])
            yield from filter(None, [did_you_mean(choice["given"], known)])
            return
        options = list(self._options())
        for word in getattr(self, "_given", []):
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in options):
                hint = did_you_mean(name, options)
                yield f"{name} is not an option; {hint}" if hint else f"{name} is not an option"

    def _options(self) -> Iterator[str]:
        """Yields the options of this parser and of its commands."""
        for action in self._actions:
            yield from (option for option in action.option_strings if option.startswith("--"))
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from command._options()
