"""The settings with which both sides start: those of the run, without what a ladder does not need."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlframe.algorithms.requirements import Requirements
from rlframe.cluster.config import Device
from rlframe.megatron.cpu import platform
from rlframe.run.check import check, planned_faults
from rlframe.run.check.context import algorithm_of, architecture_of, online
from rlframe.run.config import Mode, RunConfig
from rlframe.run.load import to_run
from rlframe.tools.explain_gap.rung import Subject
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

REPLAY = "train.moe.router_replay"
ALWAYS = {
    "mode": Mode.TRAIN.value,
    "rollout.num_engines": 1,
    "rollout.record": False,
    "rollout.oversample": 1.0,
    "evaluation.num_engines": 0,
    "loop": {},
    "checkpoint": {},
    "logging": {"tensorboard": False, "report": False, "progress": False},
}
"""Settings of every start: one engine, nothing written but logs, and no lag between the sides."""


class Settings:
    """The values of a run, and the runs that differ from it in some of them."""

    def __init__(self, values: Mapping[str, Any], *, output: str):
        """
        Args:
            values: the composed configuration.
            output: folder of the logs.

        Raises:
            ConfigError: the run has a fault, trains on nothing that an engine samples, or resumes.
        """
        run = to_run(values)
        refuse(run)
        self._values = changed(values, ALWAYS | {"output": output})
        check(self.run({}))
        self.subject = self._subject()

    def _subject(self) -> Subject:
        run = self.run({})
        architecture, faults = architecture_of(run)
        if architecture is None:
            raise ConfigError(faults)
        device = Device(platform.resolve(run.cluster.device).type)
        if not any(architecture.moe_layers):
            return Subject(run=run, architecture=architecture, device=device, replays=False)
        # Both sides start ready for it, so that it can be switched without another start.
        values = changed(self._values, {REPLAY: True})
        if why_not := "; ".join(str(fault) for fault in planned_faults(to_run(values)) if REPLAY in str(fault)):
            return Subject(run=run, architecture=architecture, device=device, replays=False, why_not=why_not)
        self._values = values
        return Subject(run=self.run({}), architecture=architecture, device=device, replays=True)

    def run(self, settings: Mapping[str, Any]) -> RunConfig:
        """Returns the run with other settings, by dotted key.

        Raises:
            ConfigError: one of them is impossible.
        """
        return to_run(changed(self._values, settings))

    def faults(self, settings: Mapping[str, Any]) -> str:
        """Returns why the run cannot have these settings; empty if it can."""
        try:
            return "; ".join(map(str, planned_faults(self.run(settings))))
        except ConfigError as error:
            return "; ".join(map(str, error.faults))


def refuse(run: RunConfig) -> None:
    """Refuses a run without two sides.

    Raises:
        ConfigError: there is nothing to compare.
    """
    faults = []
    if not (online(run) and algorithm_of(run).requirements.samples_policy):
        rule = "must be an algorithm that trains on what its engine samples"
        faults.append(Fault("algorithm.name", rule, got=run.algorithm.name))
    if run.rollout.replay is not None:
        faults.append(Fault("rollout.replay", "must be null: a replay has no engine", got=run.rollout.replay))
    if run.checkpoint.start_from is not None:
        faults.append(
            Fault(
                "checkpoint.start_from",
                "must be null",
                got=run.checkpoint.start_from,
                why="both sides load the model themselves, from a folder in Hugging Face format",
                hint="convert it with python -m rlframe.tools.convert, and set model.path",
            )
        )
    if faults:
        raise ConfigError(faults)


def two_sides(run: RunConfig) -> RunConfig:
    """Returns the run without its other models, which need no devices then."""
    return replace(run, teacher=None, judge=None, reward=replace(run.reward, model=None))


def requirements_of(run: RunConfig) -> Requirements:
    """Returns what a ladder needs of the algorithm: a policy, and nothing beside it."""
    return replace(algorithm_of(run).requirements, reference=False, critic=False)


def changed(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of nested `values` with other values, by dotted key."""
    result = copy.deepcopy(dict(values))
    for key, value in settings.items():
        *path, name = key.split(".")
        place = result
        for part in path:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[name] = copy.deepcopy(value)
    return result
