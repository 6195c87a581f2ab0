"""Pages through the rollouts that a run has kept: `python -m rlframe.tools.rollouts OUTPUT --step 10 --best 3`.

Shows each with its rewards, its group and its texts; `--tokens` adds a line for every token with its numbers. On a
terminal it waits after each page; piped into another program it does not. Control characters in texts of models are
written as escapes such as \\u001b.
"""

import argparse
import itertools
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlframe.loops.reporting.samples import read_samples, sample_files
from rlframe.utils.arguments import Parser, run_tool
from rlframe.utils.text import printable

NOTHING_FOUND = 1
"""Exit status where no rollout fits."""
NO_SAMPLES = 2
"""Exit status where the run has kept none."""
WHENCE = "logging.samples.keep chooses them, and only runs that sample have some"
COLUMNS = ("token", "id", "text", "turn", "engine", "trainer", "gap", "advantage", "version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Shows the rollouts that the command line asks for. Returns the exit status."""
    options = parser().parse_args(arguments)
    files = sample_files(options.output)
    if not files:
        missing = f"has no rollouts in samples/: {WHENCE}" if options.output.is_dir() else "is not a folder"
        print(printable(f"{options.output} {missing}"), file=sys.stderr)
        return NO_SAMPLES
    found = list(picked(options, files))
    if not found:
        print("no kept rollout fits", file=sys.stderr)
        return NOTHING_FOUND
    width, height = shutil.get_terminal_size(fallback=(120, 24))
    lines = (line for record in found for line in shown(record, width=width, tokens=options.tokens))
    page(lines, height=height - 1 if sys.stdout.isatty() and sys.stdin.isatty() else None)
    return 0


def parser() -> Parser:
    """Returns the parser of the command line."""
    made = Parser(prog="python -m rlframe.tools.rollouts", description=__doc__)
    made.add_argument("output", type=Path, help="the run's folder")
    made.add_argument("--step", type=int, help="only this step; default: all")
    made.add_argument("--evaluation", action="store_true", help="only answers to held-out prompts")
    order = made.add_mutually_exclusive_group()
    order.add_argument("--best", type=count, metavar="N", help="those of the N attempts with the highest reward")
    order.add_argument("--worst", type=count, metavar="N", help="those of the N attempts with the lowest reward")
    made.add_argument("--search", default="", metavar="TEXT", help="only those with this text, in either case")
    made.add_argument("--tokens", action="store_true", help="a line for every token")
    return made


def count(text: str) -> int:
    """Returns a number of rollouts.

    Raises:
        argparse.ArgumentTypeError: it is not a whole number from 1 on.
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text}")
    return int(text)


def picked(options: argparse.Namespace, files: Iterable[tuple[int, str, Path]]) -> Iterable[dict[str, Any]]:
    """Returns the rollouts that fit, in the order that is asked for."""
    wanted = (
        path
        for step, evaluation, path in files
        if options.step in (None, step) and bool(evaluation) >= options.evaluation
    )
    found = (record for path in wanted for record in read_samples(path) if has(record, options.search))
    if options.best:
        return of_first(sorted(found, key=lambda record: -_reward(record, missing=-math.inf)), options.best)
    if options.worst:
        return of_first(sorted(found, key=lambda record: _reward(record, missing=math.inf)), options.worst)
    return found


def of_first(records: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns the rollouts of the first `count` attempts. All sequences of an attempt have its reward."""
    attempts: list[list[dict[str, Any]]] = []
    for record in records:
        if attempts and _goes_on(record, attempts[-1][-1]):
            attempts[-1].append(record)
        elif len(attempts) == count:
            break
        else:
            attempts.append([record])
    return list(itertools.chain.from_iterable(attempts))


def _goes_on(record: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Returns whether a rollout is a further sequence of the attempt of the one before it."""
    same = all(record.get(name) == before.get(name) for name in ("step", "evaluation", "group", "id", "sample_index"))
    return same and record["sequence"] > before["sequence"]


def has(record: Mapping[str, Any], search: str) -> bool:
    """Returns whether a text of the rollout has `search` in it."""
    texts = (
        record["id"],
        record["prompt"],
        record["response"],
        record["answer"] or "",
        "".join(record["tokens"]["pieces"]),
    )
    return any(search.casefold() in str(text).casefold() for text in texts)


def shown(record: Mapping[str, Any], *, width: int, tokens: bool = False) -> Iterator[str]:
    """Yields the lines of a rollout, safe for a terminal.

    Args:
        width: of the terminal.
        tokens: whether to add a line for every token.
    """
    for line in described(record):
        yield from wrapped(line, width, indent="  ")
    for who, text in stretches(record["tokens"]):
        for line in text.split("\n"):
            yield from wrapped(f"{who:>11}  {line}", width, indent=" " * 13)
            who = ""
    if tokens:
        yield from token_lines(record["tokens"])
    yield ""


def stretches(tokens: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str]]:
    """Yields who wrote each stretch of the tokens, and its text."""
    place = 0
    for sampled, own in itertools.groupby(tokens["sampled"]):
        end = place + sum(1 for _ in own)
        who = "policy" if sampled else "environment" if place else "prompt"
        yield who, "".join(tokens["pieces"][place:end])
        place = end


def wrapped(text: str, width: int, *, indent: str) -> Iterator[str]:
    """Yields lines of at most `width` characters, safe for a terminal. Further ones begin with `indent`."""
    text = printable(text).expandtabs(4)
    yield text[:width]
    room = max(1, width - len(indent))
    for start in range(width, len(text), room):
        yield indent + text[start : start + room]


def described(record: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines about a rollout as a whole."""
    kind = f"evaluation {record['evaluation']} at step" if record["evaluation"] else "step"
    reward = _short(record["reward"])
    sequence = f", sequence {record['sequence']}" if record["sequence"] else ""
    yield f"{kind} {record['step']}, prompt {record['id']}, attempt {record['sample_index']}{sequence}: reward {reward}"
    parts = ", ".join(f"{name} {_short(value)}" for name, value in record["reward_parts"].items())
    answer = "" if record["answer"] is None else f"; right answer: {record['answer']}"
    ended = f"ended: {record['finish_reason']} {record['ending']}".rstrip()
    yield f"  {parts}{'; ' if parts else ''}{ended}{answer}"
    if "group_rewards" in record:
        rewards = " ".join(_short(each) for each in record["group_rewards"])
        advantage = _short(record["group_advantages"][record["group_place"]])
        sequences = len(record["group_rewards"])
        # Files of before the number of attempts have none.
        attempts = record.get("group_attempts", sequences)
        among = f", {attempts} attempts in {sequences} sequences" if attempts < sequences else ""
        yield f"  rewards of the group{among}: {rewards}; advantage here: {advantage}"


def token_lines(tokens: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yields a table of the tokens and their numbers."""
    yield "  " + " ".join(f"{name:>9}" for name in COLUMNS)
    for place, piece in enumerate(tokens["pieces"]):
        engine, trainer = tokens["rollout_logprobs"][place], tokens.get("trainer_logprobs", {place: None})[place]
        sampled = tokens["sampled"][place]
        row: list[Any] = [place, tokens["ids"][place], _quoted(piece)]
        if sampled:
            gap = None if trainer is None or engine is None else trainer - engine
            advantage = tokens["advantages"][place] if "advantages" in tokens else None
            row += [tokens["turns"][place] + 1, engine, trainer, gap, advantage, tokens["versions"][place]]
        yield "  " + " ".join(f"{_short(each):>9}" for each in row)


def page(lines: Iterable[str], *, height: int | None) -> None:
    """Prints the lines. Waits for a key and Return after each `height` lines, unless it is None; `q` ends."""
    try:
        for number, line in enumerate(lines, start=1):
            print(line)
            if height and number % height == 0 and input("-- Return: more, q: quit -- ").strip().lower() == "q":
                return
    except (EOFError, KeyboardInterrupt):
        print()


def _reward(record: Mapping[str, Any], *, missing: float) -> float:
    return missing if record["reward"] is None else record["reward"]


def _quoted(piece: str) -> str:
    return repr(printable(piece))[1:-1].replace("\\\\u", "\\u") or "''"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_tool(main)
