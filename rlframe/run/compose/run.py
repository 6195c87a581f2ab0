"""A whole run, from its configuration to the closing paragraph."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial

from rlframe.algorithms.base import Algorithm, OfflineAlgorithm, OnlineAlgorithm
from rlframe.cluster.joined import job
from rlframe.cluster.reaper import reaping
from rlframe.cluster.roles import CRITIC
from rlframe.cluster.watch.watchdog import watching, work
from rlframe.loops.callbacks import Callbacks
from rlframe.loops.offline import OfflineLoop
from rlframe.loops.online import OnlineLoop
from rlframe.loops.proving import Prover
from rlframe.loops.replay import ReplayLoop
from rlframe.loops.reporting.start_up import StartUp
from rlframe.loops.reporting.summary import closing_paragraph
from rlframe.loops.restarts import Restarts
from rlframe.loops.resuming import Resumption
from rlframe.loops.stop import Stop
from rlframe.megatron.driver.policy import ModelGroup
from rlframe.run import evaluation
from rlframe.run.compose.modes.evaluate import evaluate
from rlframe.run.compose.modes.generate import generate
from rlframe.run.compose.modes.self_test import self_test, without_learning
from rlframe.run.compose.offline import offline
from rlframe.run.compose.online import online
from rlframe.run.compose.parts import LOGS, Parts
from rlframe.run.compose.profiling import profiler
from rlframe.run.compose.replay import replay
from rlframe.run.config import Mode, RunConfig
from rlframe.run.forks import forks
from rlframe.run.preflight.explain import explaining
from rlframe.utils.errors import ConfigError, NodeDied
from rlframe.utils.process import garbage
from rlframe.utils.registry import find

logger = logging.getLogger(__name__)


def run(
    config: RunConfig,
    stop: Stop | None = None,
    *,
    began: float | None = None,
    callbacks: Callbacks | None = None,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Does what `mode` says. Runs the whole run, or the rest of it if its folder holds a checkpoint, and prints the
    closing paragraph; or evaluates, generates, or tests itself.

    If a joined cluster loses a node of the run, it goes on from the last checkpoint on the nodes that are left or have
    come, at most `cluster.max_restarts` times.

    Args:
        stop: ends the loop before its last step on request; None for a run that nothing ends early.
        began: when the start began, of `time.monotonic`, for what is said of its duration; None means now.
        callbacks: called between the parts of a training run.
        begin: called when the start is over, and work begins.

    Returns:
        The results: `after/...` of the last evaluation, or `last_loss`.

    Raises:
        NodeDied: no restart is left, or the cluster has too few devices without the node.
    """
    stop = stop or Stop()
    deaths: list[NodeDied] = []
    while True:
        try:
            return run_on(config, stop, began=began, callbacks=callbacks or Callbacks(), begin=begin)
        except NodeDied as error:
            began = None
            deaths.append(error)
            if len(deaths) > config.cluster.max_restarts:
                raise
            logger.warning("%s; going on from the last checkpoint with the nodes that are left or come back", error)
        except ConfigError as error:
            if not deaths:
                raise
            raise NodeDied(f"{deaths[-1]}; {'; '.join(map(str, error.faults))}") from error


def run_on(
    config: RunConfig, stop: Stop, *, began: float | None, callbacks: Callbacks, begin: Callable[[], None]
) -> dict[str, float]:
    """Runs the run on the nodes that the cluster has now; see `run`."""
    garbage.hold()
    started = time.monotonic() if began is None else began
    start_up = StartUp(started, begin)
    trains = config.mode is Mode.TRAIN
    if config.mode is Mode.SELF_TEST:
        config = without_learning(config)
    component, _ = find("rlframe.algorithms", config.algorithm.name, key="algorithm.name")
    algorithm: Algorithm = component(config.algorithm)
    with (
        explaining(config, algorithm) if trains else nullcontext(),
        watching(config.cluster, config.folder / LOGS, learns=trains) as watchdog,
        ExitStack() as stack,
        work(watchdog),
    ):
        reaper = stack.enter_context(reaping(config.cluster.stall_warning_s))
        watchdog.beat, watchdog.leaving = reaper.beat, reaper.leave
        forks(config, stack)
        parts = Parts(config, algorithm.requirements, stack, start_up, callbacks)
        start_up.done("imports and checks")
        if not trains:
            return without_training(parts, algorithm, stop)
        loop = compose(parts, algorithm)
        garbage.release()
        for caution in cautions(parts, algorithm):
            loop.metrics.print_line(f"warning: {caution}")
        loop.schedule.stop, loop.schedule.begin = stop, start_up.over
        assert loop.metrics.alerts, "of every run that trains"
        loop.metrics.alerts.stop = partial(stop.ask, saves=False)
        callbacks.on_start(config, loop.results)
        watchdog.server_died = lambda server: stop.ask(f"{server} of Ray died, which Ray itself does not outlive")
        loop.schedule.prove = Prover(
            parts.groups,
            loop.phase,
            every_steps=config.cluster.audit_every_steps,
            asked=watchdog.asked,
            ask_engines=loop.weight_sync.ask_for_audit if isinstance(loop, OnlineLoop) else None,
        ).after
        if config.profile.steps:
            loop.schedule.profiled = profiler(parts, loop).around
        rest = Resumption(config.checkpoint, loop, parts.checkpoints, parts.groups)
        Restarts(config.cluster.max_restarts, parts.groups, start_anew=rest.start_anew).retry_after_restart(rest.finish)
        start_up.done("preparation", at=rest.ready_at)
        loop.metrics.print_line(
            closing_paragraph(
                name=config.name,
                steps=config.steps,
                output=config.output,
                results=loop.results,
                phase_totals=loop.phase.totals,
                start_up=start_up,
                total_s=time.monotonic() - started,
                joined=config.cluster.joins is not None,
            )
        )
        callbacks.on_end()
        return loop.results


def without_training(parts: Parts, algorithm: Algorithm, stop: Stop) -> dict[str, float]:
    """Does what a mode that trains nothing is for, and returns its results."""
    if parts.config.mode is Mode.SELF_TEST:
        stop.outside_steps = "before the end of the self test; there is no verdict"
        return self_test(parts, algorithm, stop)
    if parts.config.mode is Mode.EVALUATE:
        stop.outside_steps = "before the end of the evaluation; there are no results"
        return evaluate(parts, algorithm)
    stop.outside_steps = "before the last prompt; the same command goes on with the prompts that have no responses yet"
    return generate(parts)


def cautions(parts: Parts, algorithm: Algorithm) -> Iterator[str]:
    """Yields a warning about each setting that is allowed, but likely to be a mistake."""
    yield from algorithm.cautions(parts.config.facts)
    found = [job.caution(parts.config.checkpoint.on_signal_s), evaluation.caution(parts.config)]
    for group in parts.groups:
        if isinstance(group, ModelGroup):
            caution = group.setup.train.optimizer.caution(group.setup.total_optimizer_steps)
            found.append(caution and f"{'critic.train' if group.role == CRITIC else 'train'}.{caution}; lower it")
    yield from filter(None, found)


def compose(parts: Parts, algorithm: Algorithm) -> OnlineLoop | ReplayLoop | OfflineLoop:
    """Returns the loop of the algorithm, with every part started."""
    if algorithm.requirements.online:
        assert isinstance(algorithm, OnlineAlgorithm)
        return online(parts, algorithm) if parts.config.rollout.replay is None else replay(parts, algorithm)
    assert isinstance(algorithm, OfflineAlgorithm)
    return offline(parts, algorithm)
