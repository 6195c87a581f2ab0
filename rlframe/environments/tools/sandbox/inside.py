"""The program that a sandbox begins with. It gives up what the sandbox's maker may do, sets limits, and runs code.

The interpreter gets this file as text, because rlframe is not to be seen in there. So it imports nothing of rlframe.
"""

import ast
import json
import linecache
import os
import resource
import sys
import traceback
from typing import Any

BEGUN = b"\x00begun\n"
"""Bytes that are written before the code begins."""
NAME = "<code>"
OPEN_FILES = 256


def main() -> None:
    """Reads the code from standard input, and runs it. The first argument is the JSON of the settings."""
    settings = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    # What was standard input is a pipe to the process that runs sessions.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # A machine that runs out of memory ends this first.
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    if (user := settings["user"]) is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    limit(settings)
    sys.argv = [NAME]
    # What was written before a limit ended the code is told too.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.write(1, BEGUN)
    sys.exit(run(code))


def limit(settings: dict[str, Any]) -> None:
    """Sets the limits that the kernel keeps."""
    lower(resource.RLIMIT_AS, settings["memory_bytes"])
    # The first limit ends a program with a signal that says why.
    lower(resource.RLIMIT_CPU, settings["cpu_s"], settings["cpu_s"] + 1)
    lower(resource.RLIMIT_FSIZE, settings["file_bytes"])
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_MEMLOCK, 0)
    lower(resource.RLIMIT_MSGQUEUE, 0)
    if (processes := settings["processes"]) is not None:
        lower(resource.RLIMIT_NPROC, processes)


def lower(kind: int, value: int, hard: int | None = None) -> None:
    """Sets one limit, unless a lower one holds already."""
    most = resource.getrlimit(kind)[1]
    hard = value if hard is None else hard
    if most != resource.RLIM_INFINITY:
        hard = min(hard, most)
    resource.setrlimit(kind, (min(value, hard), hard))


def run(code: str) -> int:
    """Runs code, prints the value of its last expression, and returns the exit code."""
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(code, NAME)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, NAME, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NAME, "eval"), scope)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit:
        raise
    except BaseException as error:  # Code that fails is an answer: the policy reads its traceback.
        sys.stdout.flush()
        # The first line is about this file.
        behind = error.__traceback__.tb_next if error.__traceback__ else None
        shown = None if isinstance(error, SyntaxError) and behind and not behind.tb_next else behind
        traceback.print_exception(type(error), error, shown)
        return 1
    return 0


if __name__ == "__main__":
    main()
