"""The composition root: from a RunConfig to objects that know nothing of each other. Read top to bottom."""

import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from rlframe.algorithms.base import Algorithm, OfflineAlgorithm, OnlineAlgorithm
from rlframe.algorithms.gkd import Gkd
from rlframe.cluster import runtime
from rlframe.cluster.config import Device
from rlframe.cluster.placement import Placement, count_devices, reserve
from rlframe.cluster.reaper import reaping
from rlframe.cluster.watch.activities import waiting
from rlframe.cluster.watch.watchdog import watching, work
from rlframe.data.kinds import find_stream
from rlframe.data.prompts import PromptStream
from rlframe.data.turns import Tokens
from rlframe.environments.base import find_environment
from rlframe.loops.checkpointing import Checkpoints, read_state
from rlframe.loops.distillation import (
    Author,
    DataAuthor,
    MixedSampler,
    Teacher,
    TeacherAuthor,
    responses,
    with_teacher,
)
from rlframe.loops.exporting import Exporter
from rlframe.loops.judging import ModelJudge, Scorer
from rlframe.loops.metrics import MetricsLog
from rlframe.loops.offline import OfflineLoop
from rlframe.loops.online import OnlineLoop
from rlframe.loops.phases import Phases, Sleeper
from rlframe.loops.probe import MAX_TOKENS, MIN_SEQUENCES, Probe, probe_sequences
from rlframe.loops.proving import Prover
from rlframe.loops.reference import PrecomputedReference
from rlframe.loops.restarts import Restarts
from rlframe.loops.resuming import Resumption, first_version
from rlframe.loops.run import RunConfig, models_beside
from rlframe.loops.sampling import DynamicSampler, PlainSampler, Sampler
from rlframe.loops.stop import Stop
from rlframe.loops.summary import closing_paragraph
from rlframe.loops.teacher_config import TeacherPlacement
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.cpu import platform
from rlframe.megatron.driver.frozen_group import FrozenGroupSetup, RewardModelGroup, TeacherGroup
from rlframe.megatron.driver.policy import CriticGroup, PolicyGroup, PolicySetup
from rlframe.megatron.driver.rank_group import RankGroup
from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.rewards.judge import Judge
from rlframe.rollout.base.config import EngineDtype, RolloutConfig
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.rollout.fleet.teacher import TeacherEngines
from rlframe.rollout.fleet.worker import RolloutSetup
from rlframe.utils.registry import find
from rlframe.utils.secrets import without_secrets
from rlframe.weight_sync.channel import WeightSync

LOGS = "logs"
"""Folder of the workers' logs and of everybody's marks."""


def run(config: RunConfig, stop: Stop | None = None) -> dict[str, float]:
    """Does the whole run, or the rest of it when its folder holds a checkpoint, and prints the closing paragraph.

    Args:
        stop: ends the loop before its last step where that is asked for; None for a run that nothing ends early.

    Returns:
        The results that the paragraph tells: `after/...` of the last evaluation, or `last_loss`.
    """
    started = time.monotonic()
    component, _ = find("rlframe.algorithms", config.algorithm.name, key="algorithm.name")
    algorithm: Algorithm = component(config.algorithm)
    logs = pathlib.Path(config.output).absolute() / LOGS
    with watching(config.cluster, logs) as watchdog, ExitStack() as stack, work(watchdog):
        watchdog.beat = stack.enter_context(reaping(config.cluster.stall_warning_s))
        builder = Builder(config, algorithm, stack)
        if algorithm.online:
            assert isinstance(algorithm, OnlineAlgorithm)
            loop = builder.online(algorithm)
        else:
            assert isinstance(algorithm, OfflineAlgorithm)
            loop = builder.offline(algorithm)
        loop.stop = stop or Stop()
        loop.prove = Prover(
            builder.groups,
            loop.phase,
            every_steps=config.cluster.audit_every_steps,
            asked=watchdog.asked,
            ask_engines=loop.weight_sync.ask_for_audit if isinstance(loop, OnlineLoop) else None,
        ).after
        rest = Resumption(config.checkpoint, loop, builder.checkpoints, builder.groups)
        Restarts(config.cluster.max_restarts, builder.groups, start_anew=rest.start_anew).outlast(rest.finish)
        loop.metrics.say(
            closing_paragraph(
                config,
                loop.results,
                loop.phase.totals,
                ready_s=rest.ready_at - started,
                total_s=time.monotonic() - started,
            )
        )
        return loop.results


class Builder:
    """Makes the parts of a loop and puts what must be closed on `stack`."""

    def __init__(self, config: RunConfig, algorithm: Algorithm, stack: ExitStack):
        self.config, self.algorithm, self.stack = config, algorithm, stack
        self.folder = pathlib.Path(config.output).absolute()
        self.parallel = Parallel.parse(config.train.parallel)
        self.device = platform.resolve(config.cluster.device)
        self.num_engines = config.rollout.num_engines if algorithm.online else 0
        # First of all: it takes seconds at most, and what it finds must not wait for anything.
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint)
        self.latest = self.checkpoints.latest()
        self.critic = algorithm.critic if isinstance(algorithm, OnlineAlgorithm) else None
        self.teacher = config.teacher
        self.tokenizer = tokenizer.load(resolve(config.model))
        self.groups: list[RankGroup] = []
        """The ranks of every model that is trained, and of the frozen ones that have ranks of their own."""

    def online(self, algorithm: OnlineAlgorithm) -> OnlineLoop:
        """Every part of the online loop, started and calibrated."""
        config = self.config
        prompts = PromptStream(config.data, tokenizer=self.tokenizer, seed=config.seed)
        by_model_alone = config.reward.model and not config.reward.parts
        functions = None if by_model_alone else self.stack.enter_context(Judge(config.reward))
        examples = self._responses(algorithm, prompts)
        placement = self._devices()
        policy = self._policy(placement)
        critic = self._critic_group(placement) if self.critic else None
        rollout = self._rollout(placement)
        engines = self._teacher_engines(placement)
        teacher = self._teacher(placement, policy, engines)
        policy.start()
        if critic:
            critic.start()
        rollout.start()
        weight_sync = WeightSync(policy, rollout, config.weight_sync)
        weight_sync.connect()
        weight_sync.calibrate(version=first_version(config.checkpoint, self.latest))
        rollout.rejoin, rollout.restore = weight_sync.rejoin, weight_sync.restore
        rollout.audit = weight_sync.audit_if_due
        environment, settings = find_environment(config.rollout)
        rollout.respond = environment(settings).respond
        metrics = self._metrics()
        # The engines make room for training on a shared GPU; models stay where they are, unless asked to sleep too.
        sharing: list[Sleeper] = [rollout] if self.device.type == "cuda" and config.cluster.colocate else []
        if config.train.offload_optimizer:
            sharing.append(policy)
        if critic and config.critic_train.offload_optimizer:
            sharing.append(critic)
        phase = Phases(sharing=sharing, announce=metrics.announce)
        judge = self._judge(placement, functions, phase)
        author = self._author(algorithm, examples, engines)
        sampler = self._sampler(algorithm, prompts, rollout, judge, phase, author)
        return OnlineLoop(
            config=config,
            algorithm=algorithm,
            prompts=prompts,
            rollout=rollout,
            judge=judge,
            sampler=sampler,
            policy=policy,
            critic=critic,
            weight_sync=weight_sync,
            phase=phase,
            metrics=metrics,
            checkpoints=self.checkpoints,
            export=Exporter(config, policy, critic=critic),
            teacher=teacher,
            probe=self._probe(prompts, rollout) if config.weight_sync.probe_every_steps else None,
        )

    def _responses(self, algorithm: OnlineAlgorithm, prompts: PromptStream) -> Mapping[str, Tokens] | None:
        """The data's response to each prompt, where some steps train on them."""
        config = self.config
        if not isinstance(algorithm, OfflineAlgorithm) or not algorithm.needs_responses:
            return None
        limit = config.train.sequence_tokens
        return responses(config.data, prompts, tokenizer=self.tokenizer, seed=config.seed, max_tokens=limit)

    def _author(
        self, algorithm: OnlineAlgorithm, examples: Mapping[str, Tokens] | None, engines: TeacherEngines | None
    ) -> Author | None:
        """Who writes the responses that the policy does not; None where it writes all."""
        if examples is not None:
            return DataAuthor(examples=examples, tokenizer=self.tokenizer)
        if isinstance(algorithm, Gkd) and algorithm.config.seq_kd:
            assert engines is not None, "refused by config.check"
            return TeacherAuthor(engines=engines, sampling=self.config.rollout.sampling())
        return None

    def _sampler(
        self,
        algorithm: OnlineAlgorithm,
        prompts: PromptStream,
        rollout: RolloutGroup,
        judge: Scorer,
        phase: Phases,
        author: Author | None,
    ) -> Sampler:
        """Where the algorithm's rollouts come from."""
        parts = {
            "prompts": prompts,
            "rollout": rollout,
            "judge": judge,
            "phase": phase,
            "prompts_per_step": self.config.prompts_per_step,
            "group_size": algorithm.group_size,
        }
        if author:
            assert isinstance(algorithm, Gkd)
            return MixedSampler(**parts, author=author, samples=partial(algorithm.samples, self.config.seed))
        if algorithm.dynamic_sampling is None:
            return PlainSampler(**parts)
        minibatches = self.config.train.minibatches
        if self.critic:
            minibatches = math.lcm(minibatches, self.config.critic_train.minibatches)
        return DynamicSampler(**parts, dynamic=algorithm.dynamic_sampling, minibatches=minibatches)

    def offline(self, algorithm: OfflineAlgorithm) -> OfflineLoop:
        """Every part of the offline loop, started."""
        config = self.config
        examples = find_stream(algorithm.data)(
            config.data,
            tokenizer=self.tokenizer,
            seed=config.seed,
            max_tokens=config.train.sequence_tokens,
        )
        placement = self._devices()
        policy = self._policy(placement)
        teacher = self._teacher(placement, policy, self._teacher_engines(placement))
        policy.start()
        metrics = self._metrics()
        precomputes = algorithm.precomputes_reference
        return OfflineLoop(
            config=config,
            algorithm=algorithm,
            examples=examples,
            policy=policy,
            model=PrecomputedReference(policy, self.folder / "reference") if precomputes else policy,
            teacher=teacher,
            phase=Phases(sharing=[], announce=metrics.announce),
            metrics=metrics,
            checkpoints=self.checkpoints,
            export=Exporter(config, policy),
        )

    def _devices(self) -> Placement:
        cluster = self.config.cluster
        shape = {
            "num_ranks": self.parallel.world,
            "num_engines": self.num_engines,
            "devices_per_engine": self.config.rollout.devices_per_engine,
            "colocate": cluster.colocate,
            "beside": models_beside(self.config, has_critic=self.critic is not None),
        }
        with waiting("start of Ray", role="driver", limit_s=math.inf, start_limit_s=cluster.start_timeout_s):
            self.stack.enter_context(runtime.running(cluster, num_devices=count_devices(**shape)))
            placement = reserve(**shape, gpu=self.device.type == "cuda", timeout_s=cluster.start_timeout_s)
        self.stack.callback(placement.release)
        return placement

    def _policy(self, placement: Placement) -> PolicyGroup:
        config = self.config
        warmup = self.algorithm.critic_warmup_steps if isinstance(self.algorithm, OnlineAlgorithm) else 0
        setup = PolicySetup(
            model=config.model,
            train=config.train,
            device=Device(self.device.type),
            seed=config.seed,
            temperature=config.rollout.temperature if self.algorithm.online else 1.0,
            total_optimizer_steps=(config.steps - warmup) * config.train.minibatches * config.train.epochs,
            with_reference=self.algorithm.needs_reference,
            reference_update=self.algorithm.reference_update,
            teacher=self.teacher.model if self.teacher and self.teacher.placement is TeacherPlacement.WORKERS else None,
        )
        policy = PolicyGroup(
            setup,
            self.algorithm,
            slots=placement.policy,
            num_threads=self._threads(self.parallel.world),
            **self._limits(),
        )
        self.groups.append(policy)
        return policy

    def _teacher(
        self, placement: Placement, policy: PolicyGroup, engines: TeacherEngines | None
    ) -> Callable[[Any], Any] | None:
        """What puts the teacher's word into a batch, if the algorithm asks for it."""
        if self.teacher is None or not self.algorithm.asks_teacher:
            return None
        teacher: Teacher = policy
        if self.teacher.placement is TeacherPlacement.ENGINE:
            assert engines is not None
            teacher = engines
        elif layout := self.teacher.own_layout:
            setup = FrozenGroupSetup(
                model=self.teacher.model,
                train=self.config.train,
                layout=layout,
                device=Device(self.device.type),
                temperature=self.config.rollout.temperature,
            )
            slots = placement.beside[TeacherGroup.role]
            teacher = TeacherGroup(setup, slots=slots, num_threads=self._threads(len(slots)), **self._limits())
            self.groups.append(teacher)
            teacher.start()
        return partial(with_teacher, teacher=teacher, algorithm=self.algorithm)

    def _teacher_engines(self, placement: Placement) -> TeacherEngines | None:
        """The engines that hold the teacher, if there are any."""
        if self.teacher is None or self.teacher.engine is None:
            return None
        slots = placement.beside[TeacherEngines.role]
        engines = TeacherEngines(
            self._engine_setup(self.teacher.engine, self.teacher.model),
            tokenizer=self.tokenizer,
            slots=slots,
            num_threads=self._threads(len(slots)),
            **self._limits(),
        )
        engines.start()
        return engines

    def _judge(self, placement: Placement, functions: Judge | None, phase: Phases) -> Scorer:
        """What scores rollouts: reward functions, a reward model, or both."""
        model = self.config.reward.model
        if model is None:
            assert functions
            return functions
        setup = FrozenGroupSetup(
            model=ModelConfig(path=model.path, revision=model.revision),
            train=self.config.train,
            layout=Parallel.parse(model.parallel),
            device=Device(self.device.type),
        )
        slots = placement.beside[RewardModelGroup.role]
        group = RewardModelGroup(setup, slots=slots, num_threads=self._threads(len(slots)), **self._limits())
        self.groups.append(group)
        group.start()
        make_room = partial(phase.make_room, group) if model.colocate else lambda: None
        return ModelJudge(functions=functions, scores=group.scores, weight=model.weight, make_room=make_room)

    def _critic_group(self, placement: Placement) -> CriticGroup:
        assert self.critic is not None
        config, train = self.config, self.config.critic_train
        setup = PolicySetup(
            model=config.critic_model,
            train=train,
            device=Device(self.device.type),
            seed=config.seed,
            temperature=1.0,
            total_optimizer_steps=config.steps * train.minibatches * train.epochs,
            with_reference=False,
        )
        slots = placement.beside[CriticGroup.role]
        critic = CriticGroup(setup, self.critic, slots=slots, num_threads=self._threads(len(slots)), **self._limits())
        self.groups.append(critic)
        return critic

    def _rollout(self, placement: Placement) -> RolloutGroup:
        return RolloutGroup(
            self._engine_setup(self.config.rollout, self.config.model, with_routes=self.config.train.moe.router_replay),
            tokenizer=self.tokenizer,
            slots=placement.engines,
            num_threads=self._threads(self.num_engines),
            **self._limits(),
        )

    def _engine_setup(self, rollout: RolloutConfig, model: ModelConfig, *, with_routes: bool = False) -> RolloutSetup:
        dtype = rollout.dtype
        if dtype is EngineDtype.AUTO:
            dtype = EngineDtype(self.config.train.dtype.value)
        return RolloutSetup(
            rollout=rollout,
            model=model,
            dtype=dtype,
            device=Device(self.device.type),
            seed=self.config.seed,
            with_routes=with_routes,
        )

    def _probe(self, prompts: PromptStream, rollout: RolloutGroup) -> Probe:
        """On the first held-out prompts, or on prompts to train on where none are held out."""
        config = self.config
        limits = (rollout.max_positions, config.rollout.sequence_tokens, config.train.sequence_tokens)
        # An engine that scores may have to sample a token after the last.
        longest = min(limit - 1 for limit in limits if limit is not None)
        sequences = probe_sequences(
            prompts.evaluation_prompts() or prompts.first(MIN_SEQUENCES + 1),
            count=max(MIN_SEQUENCES, self.parallel.dp),
            max_tokens=min(MAX_TOKENS, longest),
        )
        return Probe(sequences, tokenizer=self.tokenizer, limit_nats=config.weight_sync.probe_limit_nats)

    def _limits(self) -> dict:
        cluster = self.config.cluster
        return {
            "log_folder": str(self.folder / LOGS),
            "start_timeout_s": cluster.start_timeout_s,
            "call_timeout_s": cluster.phase_timeout_s,
        }

    def _threads(self, count: int) -> int:
        """CPU threads of each of `count` processes that work at the same time on this machine."""
        return max(1, len(os.sched_getaffinity(0)) // max(1, count))

    def _metrics(self) -> MetricsLog:
        done_steps = read_state(self.latest).step if self.latest else None
        metrics = MetricsLog(
            self.config, self.folder, resolved=without_secrets(asdict(self.config)), done_steps=done_steps
        )
        self.stack.callback(metrics.close)
        return metrics
