"""One attempt to have a configuration accepted, in this process and through the real command line, with its outcome."""

import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlframe.data.kinds import find_source
from rlframe.data.prompts import PromptSource
from rlframe.models import tokenizer
from rlframe.models.hub import resolve
from rlframe.run.check import checked
from rlframe.run.config import RunConfig
from rlframe.run.load import load
from rlframe.utils.build import as_dict
from rlframe.utils.errors import RlframeError
from rlframe.utils.registry import find
from tests.campaigns.trials import Outcome, Trial

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
QUICK = ["data.evaluation_count=0", "evaluation.every_steps=0"]


class Hung(BaseException):
    """An attempt took longer than LIMIT_S."""


def composed(config: str, *overrides: str) -> dict[str, Any]:
    """The plain values of a configuration, composed once for many attempts."""
    return as_dict(load(config, [*QUICK, *overrides]))


def with_values(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`values` with dotted keys (`data__path`) set."""
    changed = copy.deepcopy(values)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        changed[section][name] = value
    return changed


def stream_of(run: RunConfig) -> Any:
    """The stream of records that the run builds before any process starts."""
    component, _ = find("rlframe.algorithms", run.algorithm.name, key="algorithm.name")
    algorithm, tokens = component(run.algorithm), tokenizer.load(resolve(run.model))
    if algorithm.online:
        return PromptSource(run.data, tokenizer=tokens, seed=run.seed)
    kind = find_source(algorithm.data)
    return kind(run.data, tokenizer=tokens, seed=run.seed, max_tokens=run.train.sequence_tokens)


def attempt(
    name: str, values: dict[str, Any], *, names: tuple[str, ...], used: Callable[[Any], str] = lambda stream: ""
) -> Trial:
    """What becomes of a configuration up to the moment at which processes would start.

    Args:
        names: what a refusal must have, such as a file with its line.
        used: what is wrong with the stream of an accepted one, if anything.
    """

    def ring(number: int, frame: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    started = time.monotonic()
    try:
        wrong = used(stream_of(checked(values)))
        outcome, said = (Outcome.WRONG, wrong) if wrong else (Outcome.USED, "")
    except RlframeError as error:
        said = str(error)
        outcome = Outcome.REFUSED if all(part in said for part in names) else Outcome.WRONG
    except Hung:
        outcome, said = Outcome.WRONG, f"no word within {LIMIT_S:g} s"
    # A traceback of any kind is what the campaign is after.
    except Exception as error:
        outcome, said = Outcome.WRONG, f"traceback: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    seconds = time.monotonic() - started
    return Trial(name=name, outcome=outcome, said=brief(said), seconds=None if outcome is Outcome.USED else seconds)


def command_line(name: str, folder: Path, *arguments: str, names: tuple[str, ...]) -> Trial:
    """What `python -m rlframe.main` says, from its start to its end; it must refuse before Ray starts."""
    temporary = folder / "ray"
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "rlframe.main", *arguments]
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds, said = time.monotonic() - started, done.stderr
    right = done.returncode == 2 and "Traceback" not in said and all(part in said for part in names)
    outcome = Outcome.REFUSED if right and not list(temporary.iterdir()) else Outcome.WRONG
    return Trial(name=f"command line: {name}", outcome=outcome, said=brief(said), seconds=seconds)


def brief(said: str) -> str:
    """The first fault of a message, without what no encoding takes."""
    line = re.sub(r"^the configuration has \d+ faults?:\s*- ", "", said.strip())
    return line.encode(errors="replace").decode()[:300]
