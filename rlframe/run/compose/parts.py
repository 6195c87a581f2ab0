"""The common parts of all compositions: the run's folder, devices, limits and logs."""

import logging
import math
import os
import pathlib
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from rlframe.algorithms.requirements import Requirements
from rlframe.cluster import runtime
from rlframe.cluster.placement import Placement, reserve
from rlframe.cluster.watch.activities import waiting
from rlframe.loops.report.page import MISSING, can_draw
from rlframe.loops.report.refresh import Refresh
from rlframe.loops.reporting.metrics import MetricsLog
from rlframe.loops.reporting.start_up import StartUp
from rlframe.loops.reporting.uploads import Uploads
from rlframe.loops.saving.checkpoints import Checkpoints, read_state
from rlframe.loops.schedule import Event, Schedule
from rlframe.megatron.cpu import platform
from rlframe.megatron.driver.rank_group import RankGroup
from rlframe.models import tokenizer
from rlframe.models.hub import resolve
from rlframe.run.config import RunConfig
from rlframe.run.roles import topology
from rlframe.utils.secrets import without_secrets

logger = logging.getLogger(__name__)
LOGS = "logs"
"""Folder of the workers' logs and of all marks."""


class Parts:
    """Common parts of the compositions. Puts everything that must be closed on `stack`."""

    def __init__(self, config: RunConfig, requirements: Requirements, stack: ExitStack, start_up: StartUp):
        self.config, self.requirements, self.stack, self.start_up = config, requirements, stack, start_up
        self.folder = pathlib.Path(config.output).absolute()
        self.device = platform.resolve(config.cluster.device)
        # First: it takes seconds at most, and its errors must not wait for anything.
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint)
        self.latest = self.checkpoints.latest()
        self.tokenizer = tokenizer.load(resolve(config.model))
        self.groups: list[RankGroup] = []
        """The groups of ranks of every trained model, and of frozen models with ranks of their own."""

    def devices(self) -> Placement:
        """Starts Ray or joins it, and reserves the devices of every role."""
        cluster, required = self.config.cluster, self.requirements
        roles = topology(self.config, online=required.online, has_critic=required.critic)
        with waiting("start of Ray", role="driver", limit_s=math.inf, start_limit_s=cluster.start_timeout_s):
            self.stack.enter_context(runtime.running(cluster, num_devices=roles.num_devices))
            placement = reserve(roles, gpu=self.device.type == "cuda", timeout_s=cluster.start_timeout_s)
        self.stack.callback(placement.release)
        self.start_up.done("Ray")
        return placement

    def start_groups(self) -> None:
        """Builds the models of all groups of ranks and loads their weights."""
        for group in self.groups:
            group.start()

    def limits(self) -> dict[str, Any]:
        """Returns the log folder and the time limits of groups of workers."""
        cluster = self.config.cluster
        return {
            "log_folder": str(self.folder / LOGS),
            "start_timeout_s": cluster.start_timeout_s,
            "call_timeout_s": cluster.phase_timeout_s,
        }

    def threads(self, count: int) -> int:
        """Returns the CPU threads of each of `count` processes that run at the same time on this machine."""
        return max(1, len(os.sched_getaffinity(0)) // max(1, count))

    def schedule(self) -> Schedule:
        """Returns which steps the loop does, and what follows which of them."""
        config = self.config
        every = {
            Event.PROBE: config.weight_sync.probe_every_steps,
            Event.EVALUATION: config.evaluation.every_steps,
            Event.EXPORT: config.checkpoint.export_every_steps,
            Event.CHECKPOINT: config.checkpoint.every_steps,
        }
        return Schedule(last_step=config.steps, every=every, checkpoints=self.checkpoints)

    @property
    def done_steps(self) -> int | None:
        """Number of steps of the latest checkpoint. None if there is none."""
        return read_state(self.latest).step if self.latest else None

    def report(self) -> list[Uploads]:
        """Returns what writes report.html beside the run. Nothing if it is switched off, or its package is missing."""
        if not self.config.logging.report:
            return []
        if not can_draw():
            logger.info("report.html is not written: %s", MISSING)
            return []
        return [Uploads("report.html", partial(Refresh, self.folder))]

    def metrics(self) -> MetricsLog:
        """Returns the log of the run, which continues from the latest checkpoint."""
        resolved = without_secrets(asdict(self.config))
        metrics = MetricsLog(
            self.config.logging,
            self.folder,
            name=self.config.name,
            steps=self.config.steps,
            resolved=resolved,
            done_steps=self.done_steps,
            decode=partial(tokenizer.piece, self.tokenizer),
            further=self.report(),
        )
        self.stack.callback(metrics.close)
        return metrics
