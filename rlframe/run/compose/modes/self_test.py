"""Composes mode=self_test: a few steps of the recipe at learning rate 0, and a verdict."""

import time
from copy import deepcopy
from dataclasses import replace

from rlframe.algorithms.base import Algorithm, OfflineAlgorithm, OnlineAlgorithm
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.environments.base import answers
from rlframe.loops.callbacks import Callbacks
from rlframe.loops.resuming import Resumption
from rlframe.loops.self_test.checks import find_checks
from rlframe.loops.self_test.procedure import (
    NUM_PROMPTS,
    Noted,
    OfflineProcedure,
    OnlineProcedure,
    Procedure,
)
from rlframe.loops.self_test.seen import Facts
from rlframe.loops.self_test.verdict import FILE, judged, require_no_fault, table, worst, write
from rlframe.loops.stop import Stop
from rlframe.megatron.config.optimizer import Schedule
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.models.hub import resolve
from rlframe.models.tokenizer import stop_token_ids
from rlframe.rollout.base.config import EngineDtype
from rlframe.run.compose.offline import offline
from rlframe.run.compose.online import online, probe
from rlframe.run.compose.parts import Parts
from rlframe.run.config import RunConfig
from rlframe.utils.process import garbage
from rlframe.utils.text import print_line


def without_learning(config: RunConfig) -> RunConfig:
    """Returns the settings with learning rate and weight decay 0, for the steps of a self test, each of which trains
    the policy. Nothing is saved."""
    changed = deepcopy(config)
    changed.steps = config.self_test.steps
    changed.checkpoint = replace(config.checkpoint, export=False)
    # The audits of the experiment need to know what engines that take reloads hold after each sync.
    changed.weight_sync.audit_every_steps = config.weight_sync.audit_every_steps or 1
    if hasattr(changed.algorithm, "critic_warmup_steps"):
        changed.algorithm.critic_warmup_steps = 0
    update = getattr(changed.algorithm, "reference_update", None)
    if update and update.every_steps:
        # A mixture of two equal numbers may round to another one.
        changed.algorithm.reference_update = replace(update, mix=1.0)
    _still(changed.train)
    if changed.critic.train:
        _still(changed.critic.train)
    return changed


def _still(train: TrainConfig) -> None:
    """Sets the learning rate to 0, which a user may not, lets nothing else move weights, and makes each step measure
    the same."""
    optimizer = train.optimizer
    optimizer.lr = optimizer.min_lr = optimizer.weight_decay = 0.0
    optimizer.schedule, optimizer.warmup_steps = Schedule.CONSTANT, 0
    optimizer.skip_norm_above = optimizer.skip_outlier_factor = None
    train.moe.bias_update_rate = 0.0
    train.norms_every_steps = min(train.norms_every_steps, 1)


def self_test(parts: Parts, algorithm: Algorithm, stop: Stop) -> dict[str, float]:
    """Runs the steps, writes `self_test.json` and prints a table. Returns no metrics.

    Raises:
        SelfTestFailed: a check has failed.
    """
    settings = parts.config.self_test
    checks = find_checks(without=settings.without, further=settings.further_checks)
    noted = Noted()
    parts.callbacks = Callbacks([noted])
    procedure = _procedure(parts, algorithm, noted)
    loop = procedure.loop
    loop.schedule.stop, loop.schedule.begin = stop, parts.start_up.over
    garbage.release()
    Resumption(parts.config.checkpoint, loop, parts.checkpoints, parts.groups).resume()
    parts.start_up.done("preparation")
    began = time.monotonic()
    findings = judged(checks, procedure.run())
    write(parts.folder, findings)
    print_line(table(findings))
    times = f"{time.monotonic() - began:.1f} s after a start of {parts.start_up}"
    print_line(f"{parts.config.name}: {worst(findings)} in {times}.\nIn {parts.folder}: {FILE}, metrics.jsonl, logs/.")
    require_no_fault(findings)
    return {}


def _procedure(parts: Parts, algorithm: Algorithm, noted: Noted) -> Procedure:
    """Returns the procedure for the algorithm's loop, with every part started."""
    config = parts.config
    if isinstance(algorithm, OfflineAlgorithm):
        loop = offline(parts, algorithm)
        return OfflineProcedure(
            loop=loop,
            settings=config.self_test,
            facts=facts(parts, algorithm),
            noted=noted,
            groups={"policy": loop.policy.workers},
        )
    assert isinstance(algorithm, OnlineAlgorithm)
    loop = online(parts, algorithm)
    groups: dict[str, WorkerGroup] = {
        "policy": loop.policy.workers,
        "rollout": loop.rollout.workers,
        "runner": loop.attempts.workers,
    }
    if loop.critic:
        groups["critic"] = loop.critic.workers
    return OnlineProcedure(
        loop=loop,
        settings=config.self_test,
        facts=facts(parts, algorithm),
        noted=noted,
        groups=groups,
        probe=probe(parts, loop.policy, loop.prompts, loop.rollout),
        prompts=loop.prompts.first(NUM_PROMPTS),
    )


def facts(parts: Parts, algorithm: Algorithm) -> Facts:
    """Returns what the checks must know of the settings. The devices are known."""
    config, train, rollout = parts.config, parts.config.train, parts.config.rollout
    single = train.dtype is Dtype.FLOAT32
    is_online = algorithm.requirements.online
    if is_online:
        single = single and rollout.dtype in (EngineDtype.AUTO, EngineDtype.FLOAT32)
    return Facts(
        online=is_online,
        temperature=rollout.temperature if is_online else 1.0,
        filtered=rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_tokens > 0,
        stop_tokens=stop_token_ids(resolve(config.model), parts.tokenizer),
        stop_strings=rollout.stop,
        float32=single,
        deterministic=train.deterministic or parts.device.type == "cpu",
        needs_reference=algorithm.needs_reference,
        given_adapter=train.lora is not None and train.lora.path is not None,
        single_turn=not answers(config.environment),
        compiles=parts.device.type == "cpu" and train.dtype is Dtype.BFLOAT16,
        dropout=train.lora is not None and train.lora.dropout > 0,
    )
