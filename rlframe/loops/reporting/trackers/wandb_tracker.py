"""Weights & Biases."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rlframe.loops.reporting.trackers.base import COLUMNS, EVALUATED, RunInfo, table
from rlframe.loops.reporting.uploads import START_S
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

logger = logging.getLogger(__name__)
KEY = "logging.wandb_project"


class Wandb:
    """Uploads to Weights & Biases, or with WANDB_MODE=offline writes what `wandb sync` uploads."""

    def __init__(self, project: str, entity: str | None, info: RunInfo):
        """Begins the run, or goes on with it.

        Raises:
            ConfigError: nobody is logged in.
        """
        import wandb  # noqa: PLC0415 - optional

        settings = wandb.Settings(silent=True, init_timeout=START_S / 2)
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            hint = "run `wandb login` or set WANDB_API_KEY; WANDB_MODE=offline needs none"
            raise ConfigError([Fault(KEY, "needs an account of Weights & Biases", hint=hint)])
        run_id = info.remembered("wandb") or secrets.token_hex(4)
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=info.name,
            group=info.group,
            tags=info.tags or None,
            dir=str(info.folder),
            config=dict(info.config),
            id=run_id,
            resume="allow",
            settings=settings,
        )
        info.remember("wandb", run_id)
        if self._run.offline:
            where = f"offline; `wandb sync {self._run.dir.removesuffix('/files')}` uploads it"
        else:
            where = f"at {self._run.url}"
        logger.info("wandb: run %s (%s) %s", info.name, run_id, where)
        self._newest = 0

    def rewind(self, done_steps: int | None) -> None:
        """Does nothing: Weights & Biases ignores a repeated step, whose numbers are equal."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step."""
        self._log(step, dict(metrics), beside=EVALUATED in metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a table of samples."""
        data = self._wandb.Table(columns=list(COLUMNS), data=table(rows), allow_mixed_types=True)
        self._log(step, {"samples": data}, beside=True)

    def _log(self, step: int, values: dict[str, Any], *, beside: bool) -> None:
        if beside:
            # Steps only go up there, and an evaluation may be done beside later ones.
            step = max(step, self._newest)
        self._newest = step
        self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        """Uploads the rest."""
        self._run.finish(exit_code=int(failed))
