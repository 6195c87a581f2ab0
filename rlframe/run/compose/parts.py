"""The common parts of all compositions: the run's folder, devices, limits and logs."""

import logging
import math
import os
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray import cloudpickle

from rlframe.algorithms.requirements import Requirements
from rlframe.cluster import runtime
from rlframe.cluster.joined import inspection, nodes
from rlframe.cluster.placement import Placement, reserve
from rlframe.cluster.watch.activities import waiting
from rlframe.data.text.chat import exported
from rlframe.loops.callbacks import Callbacks
from rlframe.loops.phases import Phases, Sleeper
from rlframe.loops.report.refresh import Page
from rlframe.loops.reporting.metrics import MetricsLog
from rlframe.loops.reporting.start_up import StartUp
from rlframe.loops.reporting.trackers import trackers
from rlframe.loops.reporting.trackers.base import Tracker
from rlframe.loops.saving.checkpoints import Checkpoints, read_state
from rlframe.loops.schedule import Event, Schedule
from rlframe.loops.stop import failure
from rlframe.megatron.cpu import platform
from rlframe.megatron.driver.rank_group import RankGroup
from rlframe.models import remote_code, tokenizer
from rlframe.models.chat_template import Exported
from rlframe.models.hub import resolve
from rlframe.models.inspection import has_mtp
from rlframe.rollout.base.speculative import SpeculativeMethod
from rlframe.run.check import check_device
from rlframe.run.check.machines.cluster import needs
from rlframe.run.compose.nsys import under_nsys
from rlframe.run.config import Mode, RunConfig
from rlframe.run.roles import topology
from rlframe.utils.build import as_dict
from rlframe.utils.secrets import without_secrets

logger = logging.getLogger(__name__)
LOGS = "logs"
"""Folder of the workers' logs and of all marks."""


def carry_code(folder: Path) -> None:
    """Logs which code of a model's folder runs, and makes its tokenizer reach other processes."""
    at = f"{remote_code.KEY}=true: code of {folder} runs here and in workers: {', '.join(remote_code.files(folder))}"
    logger.warning("%s", at)
    for module in remote_code.modules():
        # Other processes have no such module until they load the tokenizer themselves.
        cloudpickle.register_pickle_by_value(module)


def say_dropped_head(config: RunConfig, folder: Path) -> None:
    """Logs that a head for multi-token prediction is dropped, if the model has one and is trained without it."""
    if config.mode is Mode.TRAIN and not config.model.random_init and not config.train.mtp.keeps:
        if has_mtp(folder):
            logger.warning(
                "train.mtp.mode=drop: the head for multi-token prediction of %s is not loaded, and exports will lack "
                "it; with train.mtp.mode=keep it stays as it is, with train it is trained",
                config.model.path,
            )
        speculative = config.rollout.speculative
        if speculative is not None and speculative.method is SpeculativeMethod.MTP:
            logger.warning(
                "rollout.speculative.method=mtp with train.mtp.mode=drop: engines draft with the head that they load "
                "from %s, which no weight sync brings; fewer drafts are accepted as the policy moves away from it",
                config.model.path,
            )


class Parts:
    """Common parts of the compositions. Puts everything that must be closed on `stack`."""

    device: torch.device
    """The device of every rank and engine. Known from `devices` on, because a joined cluster decides it."""

    def __init__(
        self,
        config: RunConfig,
        requirements: Requirements,
        stack: ExitStack,
        start_up: StartUp | None = None,
        callbacks: Callbacks | None = None,
    ):
        """
        Args:
            start_up: times the parts of the start; None begins now.
            callbacks: told what the loop does; None tells nobody.
        """
        self.callbacks = callbacks
        self.config, self.requirements, self.stack = config, requirements, stack
        self.start_up = start_up or StartUp(time.monotonic())
        self.folder = config.folder
        # First: it takes seconds at most, and its errors must not wait for anything.
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint)
        self.latest = self.checkpoints.latest()
        self.trackers = list(self._trackers()) if config.mode is Mode.TRAIN else []
        folder = resolve(config.model)
        self.tokenizer = tokenizer.load(folder, chat_template=config.data.chat_template)
        if config.model.trust_remote_code:
            carry_code(folder)
        say_dropped_head(config, folder)
        self.num_nodes, self.num_cores = 1, len(os.sched_getaffinity(0))
        """Number of nodes of the run, and of CPU cores of the least of them. Known from `devices` on."""
        self.groups: list[RankGroup] = []
        """The groups of ranks of every trained model, and of frozen models with ranks of their own."""

    def devices(self) -> Placement:
        """Starts Ray or joins it, and reserves the devices of every role.

        Raises:
            ConfigError: a joined cluster has not the devices, the folders or the packages that the run needs.
        """
        cluster, required = self.config.cluster, self.requirements
        roles = topology(self.config, online=required.online, has_critic=required.critic)
        with waiting("start of Ray", role="driver", limit_s=math.inf, start_limit_s=cluster.start_timeout_s):
            self.stack.enter_context(runtime.running(cluster, num_devices=roles.num_devices))
            self.device = self._joined_device() if cluster.joins else platform.resolve(cluster.device)
            gpu, joins = self.device.type == "cuda", bool(cluster.joins)
            placement = reserve(roles, gpu=gpu, timeout_s=cluster.start_timeout_s, growing=joins)
            self.stack.callback(placement.release)
            under_nsys(self.config, required, placement)
            if joins:
                self.stack.enter_context(nodes.noticing_deaths(placement.nodes))
                inspection.inspect(needs(self.config, self.folder), placement.nodes)
                used = [node for node in nodes.alive() if node.id in placement.nodes]
                self.num_nodes, self.num_cores = len(used), int(min(node.num_cpus for node in used))
        self.start_up.done("Ray")
        return placement

    def _joined_device(self) -> torch.device:
        """Returns the device that `cluster.device` means on the nodes of the joined cluster, having checked the rules
        that depend on it."""
        device = nodes.settle(self.config.cluster, nodes.alive())
        check_device(replace(self.config, cluster=replace(self.config.cluster, device=device)))
        return torch.device(device.value)

    def start_groups(self) -> None:
        """Builds the models of all groups of ranks at the same time, and loads their weights."""
        for group in self.groups:
            group.begin()
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
        """Returns the CPU threads of each of `count` processes that run at the same time on the nodes of the run."""
        return max(1, self.num_cores // max(1, math.ceil(count / self.num_nodes)))

    def chat_template(self) -> Exported | None:
        """Returns the chat template that exported models get, or None if they keep their own."""
        return exported(self.tokenizer, self.config.data)

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

    def metrics(self) -> MetricsLog:
        """Returns the log of the run, which continues from the latest checkpoint."""
        metrics = MetricsLog(
            self.config.logging,
            self.folder,
            name=self.config.name,
            steps=self.config.steps,
            done_steps=self.done_steps,
            trackers=self.trackers,
            decode=partial(tokenizer.pieces, self.tokenizer),
            callbacks=self.callbacks,
            alerts=self.config.alerts,
        )
        self.stack.push(partial(_close_log, metrics))
        return metrics

    def phases(self, metrics: MetricsLog, sharing: list[Sleeper], *, asleep: Collection[Sleeper] = ()) -> Phases:
        """Returns the phases of the run, which its log shows and writes down.

        Args:
            sharing: roles that take turns on shared devices.
            asleep: those of them that sleep already.
        """
        return Phases(sharing=sharing, announce=metrics.announce, ended=metrics.timeline.ended, asleep=asleep)

    def _trackers(self) -> Iterator[Tracker]:
        """Yields the trackers, begun before any process starts that would have to wait for a wrong password."""
        config = self.config
        resolved = without_secrets(as_dict(config))
        for tracker in trackers(config.logging, self.folder, config.name, resolved, self.done_steps):
            self.stack.push(partial(_close, tracker))
            yield tracker
        if config.logging.report:
            page = Page(self.folder)
            self.stack.push(partial(_close, page))
            yield page


def _close_log(metrics: MetricsLog, _: type[BaseException] | None, error: BaseException | None, *__: Any) -> None:
    """Closes the log of a run, which has failed with `error` or has ended well."""
    metrics.close(failure(error))


def _close(tracker: Tracker, _: type[BaseException] | None, error: BaseException | None, *__: Any) -> None:
    """Closes a tracker at the end of a run, which has failed with `error` or has ended well."""
    tracker.close(failed=failure(error) is not None)
