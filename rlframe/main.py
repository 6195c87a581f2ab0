"""The entry point: `python -m rlframe.main --config-name NAME key=value ...`. Composes and checks the configuration,
then runs the loop."""

import logging
import os
import sys
from contextlib import closing

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rlframe.cluster.watch.leaving import leave_soon
from rlframe.config.load import command_line, configs_folder, to_values
from rlframe.config.sweep import Job
from rlframe.loops.stop import Stop
from rlframe.run.check import checked
from rlframe.run.config import RunConfig
from rlframe.run.folder import claim
from rlframe.utils.errors import ConfigError, RlframeError
from rlframe.utils.secrets import hidden
from rlframe.utils.text import PrintableFormatter, printable

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main() -> None:
    """Runs the program and exits with 0 after a finished run, 2 for an error that the user can fix before the run
    starts, 1 for an error during the run, 143 and 130 for a run ended by SIGTERM or Ctrl-C."""
    # An internal error keeps its whole traceback, which Hydra would shorten.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        sys.argv[1:] = command_line(sys.argv[1:])
        launch()
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        # A missing configuration or choice, or an unreadable override, found during composition.
        tell(error if isinstance(error, ConfigError) else ConfigError([str(error)]))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C before the run began\n")
        sys.exit(130)


@hydra.main(version_base="1.3", config_path=str(configs_folder()), config_name="grpo_qwen3_moe")
def launch(composed: DictConfig) -> Job:
    """Runs one composed configuration. With `-m` Hydra calls it once per combination. The sweep continues after a
    combination that ends early; its table reports it, and the exit code of the program is the greatest."""
    logging.basicConfig(level=logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableFormatter(LOG_FORMAT))
    job = Job.begin()
    stop = Stop()
    stop.listen()
    try:
        run = prepare(composed)
        with closing(claim(run, job.overrides)) as lock:
            job.output = run.output
            stop.patience_s, stop.still_ours = run.checkpoint.on_signal_s, lock.check
            from rlframe.run.compose.run import run as run_loop  # noqa: PLC0415 - a fault must not wait for ray

            job.end(run_loop(run, stop))
    except KeyboardInterrupt:
        # A sweep ends with the stopped job.
        sys.stderr.write(f"{stop.sentence or 'stopped by Ctrl-C'}\n")
        sys.exit(stop.code or 130)
    except RlframeError as error:
        tell(error)
        job.end({}, code=2 if isinstance(error, ValueError) else 1)
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            sys.exit(job.code)
    return job


def tell(error: BaseException) -> None:
    """Writes an error for a person: safe for a terminal, as it may quote models and data, and without secrets."""
    sys.stderr.write(f"{printable(hidden(str(error)))}\n")


def prepare(composed: DictConfig) -> RunConfig:
    """Returns the checked RunConfig. Each job of a sweep gets a numbered folder."""
    hydra_config = HydraConfig.get()
    config_name = hydra_config.job.config_name
    assert config_name is not None
    output = None
    if hydra_config.mode is RunMode.MULTIRUN:
        output = f"outputs/{composed.get('name', config_name)}/{hydra_config.job.num}"
    return checked(to_values(composed, config_name=config_name, output=output))


if __name__ == "__main__":
    try:
        main()
    finally:
        leave_soon()
