"""The work of the entry point: composes and checks the configuration, then runs the loop. `rlframe TOOL ...` starts a
file of `rlframe/tools`."""

import logging
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import rlframe
from rlframe.config.load import (
    REFUSALS,
    choices,
    command_line,
    config_folders,
    config_names,
    configs_folder,
    option,
    refusal,
    to_values,
)
from rlframe.config.searched import searched
from rlframe.config.sweep import Job, checked_first
from rlframe.loops.reporting.starting import awaited
from rlframe.loops.stop import Stop, Stopped
from rlframe.run import forks
from rlframe.run.settings import help
from rlframe.run.settings.completion import Completion, words_of
from rlframe.utils.errors import ConfigError, RlframeError, SweepError, UsageError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean
from rlframe.utils.process import garbage, telling
from rlframe.utils.process.telling import importing
from rlframe.utils.secrets import hidden
from rlframe.utils.text import PrintableFormatter, printable

if TYPE_CHECKING:
    from rlframe.run.config import RunConfig

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
DEFAULT_NAME = "grpo_qwen3_moe"
"""Configuration without `--config-name`."""
TOOLS = Path(__file__).parent / "tools"


def main() -> None:
    """See `rlframe.main.main`."""
    # An internal error keeps its whole traceback, which Hydra would shorten.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        if tool := tool_of(sys.argv[1:]):
            del sys.argv[1]
            runpy.run_module(f"rlframe.tools.{tool}", run_name="__main__", alter_sys=True)
            return
        if "--version" in sys.argv[1:]:
            # Hydra would tell its own.
            sys.stdout.write(f"rlframe {rlframe.__version__}\n")
            return
        if asks_for_help(sys.argv[1:]) or asks_for_completion(sys.argv[1:]):
            return
        begin_logging()
        sys.argv[1:] = command_line(sys.argv[1:], default_name=DEFAULT_NAME)
        folders = config_folders(option(sys.argv[1:], "--config-dir", "-cd"))
        with checked_first(refused), searched(folders):
            launch()
    except (*REFUSALS, ConfigError, UsageError, SweepError) as error:
        # A missing configuration or choice, or an unreadable override, found during composition; or a wrong run of a
        # sweep.
        telling.end()
        tell(error if isinstance(error, RlframeError) else refusal(error))
        sys.exit(2)
    except OSError as error:
        if not of_hydra(error, "sweep", "run_job"):
            raise
        telling.end()
        tell(
            UsageError(
                f"{error.filename} cannot be written: {error.strerror}; it is hydra.sweep.dir of a sweep, or "
                "hydra.run.dir of a run, which Hydra makes before anything begins: set that to a folder that can be "
                "written"
            )
        )
        sys.exit(2)
    except RecursionError as error:
        if not of_hydra(error, "create_defaults_list"):
            raise
        telling.end()
        tell(refusal(error))
        sys.exit(2)
    except Stopped as stopped:
        # By a signal between the jobs of a sweep, or while they are checked.
        telling.end()
        sys.stderr.write(f"{stopped}\n")
        sys.exit(stopped.code)


def of_hydra(error: Exception, *functions: str) -> bool:
    """Returns whether one of Hydra's `functions` led to the error, and no run or check was under way."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = {code.co_name for code in codes if code.co_filename == __file__}
    return ours.isdisjoint({"launch", "refused"}) and any(code.co_name in functions for code in codes)


def begin_logging() -> None:
    """Writes lines of the log to the terminal."""
    logging.basicConfig(level=logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableFormatter(LOG_FORMAT))


def tool_of(arguments: Sequence[str]) -> str | None:
    """Returns the file of `rlframe/tools` that the first argument names. None if it is an option or an override.

    Raises:
        UsageError: there is no such file.
    """
    word = arguments[0] if arguments else ""
    if not word or word.startswith(("-", "~")) or "=" in word:
        return None
    known = tool_names()
    name = word.replace("-", "_")
    if name not in known:
        rule = f"is not a tool: there are {', '.join(known)}"
        why = "a run is `rlframe --config-name NAME key=value`"
        raise UsageError(str(Fault(printable(word), rule, why=why, hint=did_you_mean(name, known))))
    return name


def tool_names() -> list[str]:
    """Returns the names of the tools, files and folders, sorted."""
    folders = [file.parent.name for file in TOOLS.glob("*/__main__.py")]
    return sorted(folders + [file.stem for file in TOOLS.glob("*.py") if not file.stem.startswith("_")])


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Prints the text of `--help` or `--help TOPIC`. Returns whether the arguments have it.

    Raises:
        UsageError: there is no such topic.
    """
    flag = next((word for word in arguments if word.partition("=")[0] in ("--help", "-h")), None)
    if flag is None:
        return False
    after = [word for word in arguments[arguments.index(flag) + 1 :] if not word.startswith("-")]
    name = flag.partition("=")[2] or next(iter(after), "")
    width = help.columns()
    if name:
        lines = help.topic(name.replace("=", "."), width=width)
    else:
        folders = config_folders(option(arguments, "--config-dir", "-cd"))
        names, groups = config_names(folders), list(choices(folders))
        lines = help.overview(tools=tool_names(), names=names, groups=groups, width=width)
    try:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def asks_for_completion(arguments: Sequence[str]) -> bool:
    """Prints the words that a shell offers after `COMP_LINE`. Returns whether the arguments ask for them. Hydra prints
    the script that makes a shell ask (`-sc install=bash`)."""
    if not arguments or arguments[0] not in ("-sc", "--shell_completion"):
        return False
    if not any(word.startswith("query=") for word in arguments):
        # The script asks the console script, also where it was made by `python -m`.
        sys.argv[0] = "rlframe"
        return False
    line = os.environ.get("COMP_LINE", "")
    words, current = words_of(line[: int(os.environ.get("COMP_POINT") or len(line))])
    folders = config_folders(option(words, "--config-dir", "-cd"))
    found = Completion(
        words,
        folders=folders,
        names=config_names(folders),
        groups=choices(folders),
        tools=tool_names(),
        default_name=DEFAULT_NAME,
    )
    sys.stdout.write("\n".join(found.of(current)) + "\n")
    return True


@hydra.main(version_base="1.3", config_path=str(configs_folder()), config_name=DEFAULT_NAME)
def launch(composed: DictConfig) -> Job:
    """Runs one composed configuration. With `-m` Hydra calls it once per combination. The sweep continues after a
    combination that ends early; its table reports it, and the exit code of the program is the greatest."""
    garbage.hold()
    job = Job.begin()
    stop = Stop()
    stop.listen()
    telling.begin()
    telling.tell(awaited)
    try:
        with forks.begun(partial(OmegaConf.select, composed, throw_on_resolution_failure=False)):
            from rlframe.run.folder import claim, dated  # noqa: PLC0415 - help must not wait for torch

            run = dated(prepare(composed))
            with closing(claim(run, job.overrides)) as lock:
                job.output = run.output
                stop.patience_s, stop.still_ours = run.checkpoint.on_signal_s, lock.check
                from rlframe.run.compose.run import run as run_loop  # noqa: PLC0415 - a fault must not wait for ray

                job.end(run_loop(run, stop, began=job.started, begin=telling.end))
    except KeyboardInterrupt:
        telling.end()
        sys.stderr.write(f"{stop.sentence or 'stopped by Ctrl-C'}\n")
        job.end({}, code=stop.code or 130)
        # A sweep ends with a job that a signal stops, and goes on after one that an alert stops.
        if stop.signalled or not stop.code or HydraConfig.get().mode is not RunMode.MULTIRUN:
            sys.exit(job.code)
    except RlframeError as error:
        telling.end()
        tell(error)
        job.end({}, code=2 if isinstance(error, ValueError) else 1)
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            sys.exit(job.code)
    except Exception:  # One run of a sweep: Hydra would end the sweep with it, without the table.
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            raise
        telling.end()
        sys.stderr.write(printable(hidden(traceback.format_exc())))
        job.end({}, code=1)
    return job


def refused(composed: DictConfig) -> RlframeError | None:
    """Returns why a job of a sweep would be refused, and starts nothing. None if it would not."""
    garbage.hold()
    stop = Stop()
    stop.outside_steps = "during the checks of a sweep, before any of the checked runs began"
    stop.listen()
    telling.begin()
    number = HydraConfig.get().job.num
    telling.tell(lambda: importing() or f"checks of run {number}, before the first run of the sweep begins")
    try:
        from rlframe.run.folder import compare, dated  # noqa: PLC0415 - as in launch

        compare(dated(prepare(composed)))
    except RlframeError as error:
        return error
    except Exception:  # The run itself ends with it and tells it, and the sweep goes on to the next one.
        return None
    return None


def tell(error: BaseException) -> None:
    """Writes an error for a person: safe for a terminal, as it may quote models and data, and without secrets."""
    sys.stderr.write(f"{printable(hidden(str(error)))}\n")


def prepare(composed: DictConfig) -> "RunConfig":
    """Returns the checked RunConfig. Each job of a sweep gets a numbered folder in `output`."""
    from rlframe.run.check import checked  # noqa: PLC0415 - as in launch

    hydra_config = HydraConfig.get()
    config_name = hydra_config.job.config_name
    assert config_name is not None
    values = to_values(composed, config_name=config_name)
    if hydra_config.mode is RunMode.MULTIRUN:
        values["output"] = f"{values['output']}/{hydra_config.job.num}"
    return checked(values)
