"""Composes the online loop: a policy, its engines, and its rewards, critic and teacher."""

from functools import partial

import torch

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.attempts.account.leases import Leases
from rlframe.attempts.account.ledger import Ledger
from rlframe.attempts.fleet import Attempts
from rlframe.attempts.mending import Mender
from rlframe.data.cursor import tell_of_repeats
from rlframe.data.prompts import PromptSource
from rlframe.loops.evaluation.evaluate import EvaluationBeside, come_back
from rlframe.loops.evaluation.sets import EvaluationSet
from rlframe.loops.online import OnlineLoop
from rlframe.loops.phases import Sleeper
from rlframe.loops.probe import MAX_TOKENS, MIN_SEQUENCES, Probe, probe_sequences
from rlframe.loops.resuming import first_version
from rlframe.megatron.driver.policy import PolicyGroup
from rlframe.rollout.fleet.group import EvaluationEngines, RolloutGroup
from rlframe.run.check.context import algorithm_of
from rlframe.run.check.engines.adapters import sends_adapters
from rlframe.run.check.machines.memory import devices_of
from rlframe.run.compose import models
from rlframe.run.compose.parts import Parts
from rlframe.run.compose.replay import recorded
from rlframe.run.compose.sampling import given_responses, sampler
from rlframe.run.compose.sets import evaluation_sets
from rlframe.run.compose.throughput import throughput
from rlframe.run.compose.trained import Trained, trained
from rlframe.run.config import RunConfig
from rlframe.run.preflight.plan import plan
from rlframe.run.preflight.start import fits_beside_builds
from rlframe.weight_sync.adapted import ADAPTERS, BASE
from rlframe.weight_sync.adapters import AdapterSync
from rlframe.weight_sync.border import SourceRank
from rlframe.weight_sync.channel import WeightSync
from rlframe.weight_sync.config import HoldIn


def online(parts: Parts, algorithm: OnlineAlgorithm) -> OnlineLoop:
    """Returns the online loop, every part of it started and calibrated."""
    config = parts.config
    # Before Ray: what is wrong with the data is said at once, and processes that tokenise it inherit no threads of Ray.
    prompts = prompts_of(parts)
    sets = evaluation_sets(parts, prompts)
    examples = given_responses(parts, prompts)
    parts.start_up.done("data")
    placement = parts.devices()
    # All processes before any model, so that they start at the same time.
    rollout = models.rollout(parts, placement)
    apart = models.evaluation_engines(parts, placement)
    models_trained = trained(parts, placement, algorithm)
    attempts = models.attempts(parts, rollout)
    asleep = start(parts, models_trained, [rollout, apart] if apart else [rollout])
    weight_sync = synced(parts, models_trained.policy, rollout)
    parts.start_up.done("weight sync")
    rollout.rejoin, rollout.restore, rollout.audit = weight_sync.rejoin, weight_sync.restore, weight_sync.audit_if_due
    metrics = parts.metrics()
    phase = parts.phases(metrics, sharing(parts, models_trained, rollout), asleep=asleep)
    scorer = models.scorer(parts, placement, phase)
    ledger = Ledger(parts.folder, done_steps=parts.done_steps or 0)
    leases = Leases(prompts, ledger, curriculum=prompts if config.data.curriculum else None)
    mender = mending(parts, attempts)
    source = sampler(
        parts,
        algorithm,
        leases=leases,
        attempts=attempts,
        scorer=scorer,
        phase=phase,
        examples=examples,
        engines=models_trained.engines,
        mender=mender,
        timeline=metrics.timeline,
    )
    return OnlineLoop(
        schedule=parts.schedule(),
        algorithm=algorithm,
        prompts=prompts,
        rollout=rollout,
        attempts=attempts,
        scorer=scorer,
        leases=leases,
        sampler=recorded(parts, source, phase) if config.rollout.record else source,
        policy=models_trained.policy,
        critic=models_trained.critic,
        weight_sync=weight_sync,
        in_flight_updates=config.loop.max_policy_lag == 0 or config.loop.in_flight_updates,
        mender=mender,
        phase=phase,
        metrics=metrics,
        checkpoints=parts.checkpoints,
        throughput=throughput(parts, algorithm, critic=algorithm.critic),
        export=models_trained.exporter(parts),
        evaluation_sets=sets,
        evaluation=evaluation(parts, models_trained.policy, attempts, apart, sets) if ahead(config) else None,
        teacher=models_trained.teacher,
        probe=probe(parts, models_trained.policy, prompts, rollout) if config.weight_sync.probe_every_steps else None,
    )


def prompts_of(parts: Parts) -> PromptSource:
    """Returns the prompts of the run."""
    config = parts.config
    prompts = PromptSource(config.data, tokenizer=parts.tokenizer, seed=config.seed)
    tell_of_repeats(prompts, config.data, prompts_per_step=config.prompts_per_step)
    return prompts


def start(parts: Parts, models_trained: Trained, engines: list[RolloutGroup]) -> list[Sleeper]:
    """Builds all models and engines, at the same time where their devices have memory for it.

    Returns:
        The models that have gone to sleep to leave their devices' memory to the engines.
    """
    at_once = starts_at_once(parts.config, parts.device, resumes=parts.latest is not None)
    if at_once:
        begin(engines)
    models_trained.start(parts)
    if parts.device.type == "cuda":
        # Engines import and start meanwhile.
        models_trained.policy.warm_up()
    if at_once:
        # While the engines start.
        models_trained.policy.warm_up_sync(sent_channel(parts.config))
    else:
        # Engines import meanwhile. What stays of it, quantised weights, must be there before one measures what is free.
        models_trained.policy.channel(sent_channel(parts.config)).call(SourceRank.warm_up)
    asleep = models_trained.sleepers(parts) if parts.config.cluster.colocate else []
    for model in asleep:
        model.sleep()
    parts.start_up.done("policy")
    begin(engines)
    for group in engines:
        group.start()
    parts.start_up.done("engines")
    return asleep


def starts_at_once(config: RunConfig, device: torch.device, *, resumes: bool) -> bool:
    """Returns whether engines may start while models are built: they have devices of their own, or memory for both.

    An engine that measures the memory that is free must find there what the models hold.
    """
    if device.type != "cuda" or not config.cluster.colocate:
        return True
    accelerator = devices_of(config)
    if config.rollout.measures_memory or accelerator is None:
        return False
    return fits_beside_builds(plan(config, algorithm_of(config), accelerator), resumes=resumes)


def ahead(config: RunConfig) -> bool:
    """Returns whether engines sample while the policy trains."""
    return config.loop.max_policy_lag > 0 and not config.cluster.colocate


def begin(groups: list[RolloutGroup]) -> None:
    """Has the engines of all groups build themselves at the same time, which `start` waits for."""
    for group in groups:
        group.begin()


def shared_gpu(parts: Parts) -> bool:
    """Returns whether policy and engines are on the same GPUs. The policy must have its memory there before an engine
    starts that measures what is free."""
    return parts.device.type == "cuda" and parts.config.cluster.colocate


def sent_channel(config: RunConfig) -> str:
    """Returns the end of the name of the policy's channel: what of it is sent, and in which form."""
    return ADAPTERS if sends_adapters(config) else config.rollout.engine_format.channel


def synced(parts: Parts, policy: PolicyGroup, engines: RolloutGroup, *, channel: str = "") -> WeightSync:
    """Returns the calibrated weight sync of started ranks and engines.

    Args:
        channel: name of the sync, for the policy's ranks.
    """
    config = parts.config
    if sends_adapters(config):
        base, adapters = policy.channel(channel + BASE), policy.channel(channel + sent_channel(config))
        weight_sync = AdapterSync(base, adapters, engines, config.weight_sync)
    else:
        weight_sync = WeightSync(policy.channel(channel + sent_channel(config)), engines, config.weight_sync)
    weight_sync.connect()
    weight_sync.calibrate(version=first_version(config.checkpoint, parts.latest))
    return weight_sync


def mending(parts: Parts, attempts: Attempts) -> Mender | None:
    """Returns what brings engines back that die while the policy trains, if that is possible."""
    if parts.config.weight_sync.hold is HoldIn.NONE:
        return None
    mender = Mender(attempts)
    parts.stack.callback(mender.forget)
    return mender


def evaluation(
    parts: Parts, policy: PolicyGroup, attempts: Attempts, apart: EvaluationEngines | None, sets: list[EvaluationSet]
) -> EvaluationBeside:
    """Returns evaluations during which training goes on.

    Args:
        attempts: those of training, whose engines are shared without other ones.
        apart: engines that only evaluate.
    """
    if apart is None:
        return EvaluationBeside(attempts=attempts, sets=sets)
    weight_sync = synced(parts, policy, apart, channel=apart.role)
    apart.rejoin = partial(come_back, weight_sync)
    own = models.attempts(parts, apart, role="evaluation_runner")
    return EvaluationBeside(attempts=own, sets=sets, weight_sync=weight_sync)


def sharing(parts: Parts, models_trained: Trained, rollout: RolloutGroup) -> list[Sleeper]:
    """Returns the roles that take turns on shared devices."""
    # The engines sleep during training on a shared GPU; other models stay in memory, unless they are told to sleep too.
    turns = shared_gpu(parts) and parts.config.rollout.sleeps
    return [*([rollout] if turns else []), *models_trained.sleepers(parts)]


def probe(parts: Parts, policy: PolicyGroup, prompts: PromptSource, rollout: RolloutGroup) -> Probe:
    """Returns a probe on the first held-out prompts, or on prompts to train on where none are held out."""
    config = parts.config
    # An engine that scores may have to sample one token after the last.
    longest = min(rollout.max_positions, config.train.sequence_tokens) - 1
    sequences = probe_sequences(
        prompts.evaluation_prompts() or prompts.first(MIN_SEQUENCES + 1),
        count=max(MIN_SEQUENCES, policy.parallel.dp),
        max_tokens=min(MAX_TOKENS, longest),
    )
    return Probe(sequences, tokenizer=parts.tokenizer, limit_nats=config.weight_sync.probe_limit_nats)
