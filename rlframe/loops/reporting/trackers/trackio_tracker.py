"""Trackio, which keeps runs on this machine, on a server of one's own or in a Space of Hugging Face."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rlframe.loops.reporting.trackers.base import COLUMNS, RunInfo, table

logger = logging.getLogger(__name__)


class Trackio:
    """Writes to Trackio: to TRACKIO_DIR on this machine, to TRACKIO_SERVER_URL or to TRACKIO_SPACE_ID."""

    def __init__(self, project: str, info: RunInfo):
        import trackio  # noqa: PLC0415 - optional

        self._trackio = trackio
        # A run is found again by its name, which other runs must not have.
        known = info.remembered("trackio")
        name = known or f"{info.name}-{secrets.token_hex(2)}"
        self._run = trackio.init(
            project=project,
            name=name,
            group=info.group,
            config={**info.config, **({"tags": list(info.tags)} if info.tags else {})},
            resume="allow" if known else "never",
            embed=False,
        )
        info.remember("trackio", name)
        where = self._run.url or f"on this machine; `trackio show --project {project}` shows it"
        logger.info("trackio: run %s %s", name, where)

    def rewind(self, done_steps: int | None) -> None:
        """Does nothing: a repeated step is written twice, with equal numbers."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step."""
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a table of samples."""
        data = self._trackio.Table(columns=list(COLUMNS), data=table(rows))
        self._run.log({"samples": data}, step=step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - Trackio knows no state of a run
        """Uploads the rest."""
        self._run.finish()
