"""The models of a run in their processes: one function for each role."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rlframe.algorithms.base import Algorithm
from rlframe.attempts.fleet import Attempts
from rlframe.attempts.worker import RunnerSetup
from rlframe.cluster.config import Device
from rlframe.cluster.placement import Allocation, Placement
from rlframe.cluster.roles import CRITIC, JUDGE_ENGINES, REWARD_MODEL, TEACHER, TEACHER_ENGINES
from rlframe.environments.base import answers, pays_all
from rlframe.environments.config import EnvironmentConfig
from rlframe.loops.distillation import Teacher, with_teacher
from rlframe.loops.phases import Phases
from rlframe.loops.sampling.judging import EngineReplies, JudgeScorer, Scorers
from rlframe.loops.sampling.scoring import RewardModelScorer, Scorer
from rlframe.megatron.config.forward_only import forward_only
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.driver.forward_only_group import RewardModelGroup, TeacherGroup
from rlframe.megatron.driver.policy import CriticGroup, PolicyGroup
from rlframe.megatron.messages.setup import RankSetup, TrainerSetup
from rlframe.models import tokenizer
from rlframe.models.checkpoint import CheckpointReader
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.rollout.base.config import Logprobs, RolloutConfig
from rlframe.rollout.fleet.frozen import FrozenEngines, JudgeEngines
from rlframe.rollout.fleet.group import EvaluationEngines, RolloutGroup
from rlframe.rollout.fleet.teacher import TeacherEngines
from rlframe.rollout.fleet.worker import RolloutSetup
from rlframe.rollout.served.quantized import quantized_reader
from rlframe.run.check.engines.adapters import engine_adapter
from rlframe.run.check.engines.speculative import syncs_head
from rlframe.run.compose.parts import Parts
from rlframe.run.compose.profiling import engine_profile
from rlframe.run.roles import teacher_engine
from rlframe.run.teacher import TeacherPlacement
from rlframe.weight_sync.frozen import FrozenProof

Group = TypeVar("Group", bound=RolloutGroup)


def policy(parts: Parts, placement: Placement, algorithm: Algorithm) -> PolicyGroup:
    """Returns the policy's ranks, not started. They hold the teacher if it is placed there."""
    config, required = parts.config, parts.requirements
    steps = config.steps - required.critic_warmup_steps
    in_ranks = config.teacher and config.teacher.placement is TeacherPlacement.WORKERS
    setup = TrainerSetup(
        model=config.model,
        train=config.train,
        device=parts.device,
        num_outputs=algorithm.model_outputs,
        timeout_s=config.cluster.phase_timeout_s,
        seed=config.seed,
        temperature=config.rollout.temperature if required.online else 1.0,
        total_optimizer_steps=steps * config.train.num_minibatches * config.train.epochs_per_batch,
        with_reference=required.reference,
        reference_update=algorithm.reference_update,
        teacher=config.teacher.model if config.teacher and in_ranks else None,
        float32=required.online and config.rollout.logprobs is Logprobs.EXACT,
        merges=config.sends_merged(online=required.online),
    )
    slots = placement.policy
    group = PolicyGroup(setup, algorithm, slots=slots, num_threads=parts.threads(len(slots)), **parts.limits())
    parts.groups.append(group)
    return group


def critic(parts: Parts, placement: Placement, algorithm: Algorithm) -> CriticGroup:
    """Returns the critic's ranks, not started.

    Args:
        algorithm: algorithm that trains the critic.
    """
    config, train = parts.config, parts.config.critic_train
    setup = TrainerSetup(
        model=config.critic_model,
        train=train,
        device=parts.device,
        num_outputs=algorithm.model_outputs,
        timeout_s=config.cluster.phase_timeout_s,
        seed=config.seed,
        total_optimizer_steps=config.steps * train.num_minibatches * train.epochs_per_batch,
        with_reference=False,
        merges=False,
    )
    slots = placement.slots[CRITIC]
    group = CriticGroup(setup, algorithm, slots=slots, num_threads=parts.threads(len(slots)), **parts.limits())
    parts.groups.append(group)
    return group


def teacher(
    parts: Parts, placement: Placement, algorithm: Algorithm, ranks: PolicyGroup, engines: TeacherEngines | None
) -> Callable[[Any], Any] | None:
    """Returns the function that adds the teacher's outputs to a batch, if the algorithm needs them. Ranks of the
    teacher's own are not started.

    Args:
        ranks: the policy's ranks, which may hold the teacher.
        engines: the teacher's engines, if there are any.
    """
    config = parts.config
    if config.teacher is None or not parts.requirements.teacher_in_batch:
        return None
    speaks: Teacher = ranks
    if config.teacher.placement is TeacherPlacement.ENGINE:
        assert engines is not None
        speaks = engines
    elif layout := config.teacher.own_layout:
        setup = RankSetup(
            model=config.teacher.model,
            train=forward_only(config.train, layout),
            device=parts.device,
            temperature=config.rollout.temperature,
            timeout_s=config.cluster.phase_timeout_s,
        )
        slots = placement.slots[TEACHER]
        speaks = TeacherGroup(setup, slots=slots, num_threads=parts.threads(len(slots)), **parts.limits())
        parts.groups.append(speaks)
    return partial(with_teacher, teacher=speaks, algorithm=algorithm)


def teacher_engines(parts: Parts, placement: Placement) -> TeacherEngines | None:
    """Returns the engines of the teacher, not started, if it has any."""
    config, engine = parts.config.teacher, teacher_engine(parts.config)
    if config is None or engine is None:
        return None
    slots = placement.slots[TEACHER_ENGINES]
    engines = TeacherEngines(
        engine_setup(parts, engine, config.model),
        slots=slots,
        num_threads=parts.threads(len(slots)),
        **parts.limits(),
    )
    return engines


def scorer(parts: Parts, placement: Placement, phase: Phases) -> Scorer | None:
    """Returns what scores rollouts besides the reward functions: a reward model, a judge, both, or None."""
    found = [each for each in (reward_model(parts, placement, phase), judge(parts, placement)) if each]
    return Scorers(scorers=found) if len(found) > 1 else next(iter(found), None)


def judge(parts: Parts, placement: Placement) -> Scorer | None:
    """Returns the judge in engines of the run, started, or None."""
    config = parts.config.judge
    if config is None:
        return None
    slots = placement.slots[JUDGE_ENGINES]
    engines = JudgeEngines(
        engine_setup(parts, config.engine, config.model),
        slots=slots,
        num_threads=parts.threads(len(slots)),
        **parts.limits(),
    )
    words = tokenizer.load(resolve(config.model))
    setup = replace(
        runner_setup(parts, engines, rewarded=False),
        environment=EnvironmentConfig(),
        tokenizer=words,
        max_positions=engines.max_positions,
    )
    attempts = Attempts(engines, setup, role="judge_runner", **parts.limits())
    parts.stack.callback(attempts.close)
    engines.start()
    sampling = config.engine.sampling(greedy=True)
    ask = EngineReplies(attempts=attempts, tokenizer=words, sampling=sampling, max_positions=engines.max_positions)
    return JudgeScorer(ask=ask, config=config, weight=config.weight, paid=pays_all(parts.config.environment))


def reward_model(parts: Parts, placement: Placement, phase: Phases) -> Scorer | None:
    """Returns the reward model, started, or None."""
    config, model = parts.config, parts.config.reward.model
    if model is None:
        return None
    setup = RankSetup(
        model=ModelConfig(path=model.path, revision=model.revision),
        # What it scores may be in other tokens, and comes without groups.
        train=replace(forward_only(config.train, Parallel.parse(model.parallel)), share_prompts=False),
        device=parts.device,
        num_outputs=1,
        timeout_s=config.cluster.phase_timeout_s,
    )
    slots = placement.slots[REWARD_MODEL]
    group = RewardModelGroup(setup, slots=slots, num_threads=parts.threads(len(slots)), **parts.limits())
    parts.groups.append(group)
    group.start()
    sleep_others = partial(phase.sleep_others, group) if model.colocate else lambda: None
    return RewardModelScorer(scores=group.scores, weight=model.weight, sleep_others=sleep_others)


def attempts(parts: Parts, engines: RolloutGroup, *, role: str = "runner", rewarded: bool = True) -> Attempts:
    """Returns what attempts prompts with `engines`, whose processes exist.

    Args:
        role: name of its process in logs and errors.
        rewarded: whether the reward functions judge the attempts.
    """
    attempts = Attempts(engines, runner_setup(parts, engines, rewarded=rewarded), role=role, **parts.limits())
    parts.stack.callback(attempts.close)
    return attempts


def runner_setup(parts: Parts, engines: RolloutGroup, *, rewarded: bool) -> RunnerSetup:
    """Returns the settings of a runner that attempts prompts with `engines`."""
    reward = parts.config.reward
    return RunnerSetup(
        rollout=engines.setup.rollout.without_engine(),
        environment=parts.config.environment,
        rendering=parts.config.rendering,
        data=parts.config.data,
        tokenizer=parts.tokenizer,
        reward=reward if rewarded and reward.parts else None,
        seed=parts.config.seed,
        max_calls=engines.max_calls,
        max_positions=_max_positions(parts, engines),
        aside_share=parts.config.evaluation.share,
        end_token_ids=_end_token_ids(parts, engines),
        stop_fault=engines.setup.stop_fault,
        folder=os.getcwd(),
    )


def _end_token_ids(parts: Parts, engines: RolloutGroup) -> list[int]:
    """Returns the tokens at which the engines end a turn. None are needed where nothing follows a response."""
    if not answers(parts.config.environment):
        return []
    return tokenizer.stop_token_ids(resolve(engines.setup.model), parts.tokenizer)


def _max_positions(parts: Parts, engines: RolloutGroup) -> int:
    """Returns the greatest number of tokens of a sequence that the engines and, if there is one, the trainer take."""
    config = parts.config
    # Without a trainer this is what environment.max_tokens=null means, so that attempts are those of training.
    if config.trains(online=parts.requirements.online) or answers(config.environment):
        return min(engines.max_positions, config.train.sequence_tokens)
    return engines.max_positions


def frozen(parts: Parts, placement: Placement) -> FrozenEngines:
    """Returns engines that hold the model for good, not started."""
    config = parts.config
    slots = placement.engines
    threads = parts.threads(len(slots))
    setup = engine_setup(parts, config.rollout, config.model)
    engines = FrozenEngines(setup, slots=slots, num_threads=threads, **parts.limits())
    if not config.model.random_init:
        reader = CheckpointReader(resolve(config.model))
        tensor = quantized_reader(reader.tensor, config.rollout.engine_format)
        engines.proof = FrozenProof(tensor, engines, num_threads=parts.threads(1))
    return engines


def rollout(parts: Parts, placement: Placement) -> RolloutGroup:
    """Returns the engines that sample for training, not started."""
    count = len(placement.engines) - parts.config.evaluation.num_engines
    return _engines(parts, placement, RolloutGroup, placement.engines[:count])


def evaluation_engines(parts: Parts, placement: Placement) -> EvaluationEngines | None:
    """Returns the engines that only evaluate, not started, if there are any."""
    if not parts.config.evaluation.num_engines:
        return None
    return _engines(parts, placement, EvaluationEngines, placement.engines[-parts.config.evaluation.num_engines :])


def _engines(parts: Parts, placement: Placement, group: type[Group], slots: list[Allocation]) -> Group:
    """Returns engines of the policy on some of their slots."""
    config = parts.config
    setup = engine_setup(parts, config.rollout, config.model, with_routes=config.train.moe.router_replay)
    return group(
        replace(
            setup,
            adapter=engine_adapter(config),
            with_mtp=syncs_head(config),
            profile=engine_profile(parts) if group is RolloutGroup else None,
        ),
        slots=slots,
        num_threads=parts.threads(len(placement.engines)),
        **parts.limits(),
    )


def engine_setup(parts: Parts, config: RolloutConfig, model: ModelConfig, *, with_routes: bool = False) -> RolloutSetup:
    """Returns the start settings of engines of `config` that hold `model`."""
    return RolloutSetup(
        rollout=config,
        model=model,
        dtype=config.number_format(parts.config.train.dtype),
        device=Device(parts.device.type),
        seed=parts.config.seed,
        with_routes=with_routes,
    )
