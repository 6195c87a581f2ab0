"""Rules that span components. Each function looks at one topic and returns its faults; `check` reports all together."""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlframe.algorithms.base import Algorithm, OfflineAlgorithm, OnlineAlgorithm
from rlframe.algorithms.policy_gradient import ClippedConfig, PolicyGradientConfig
from rlframe.cluster.config import Device
from rlframe.cluster.roles import count_devices, describe
from rlframe.config import check_critic, check_data, check_reward, check_routes, check_teacher, check_train
from rlframe.config.load import to_run
from rlframe.loops.run import RunConfig, models_beside
from rlframe.megatron.config import Schedule
from rlframe.megatron.layout import Parallel
from rlframe.megatron.lora_config import faults as lora_faults
from rlframe.megatron.lora_config import trained as lora_trained
from rlframe.models import adapters, hub, shards
from rlframe.models.families.base import Architecture, Family
from rlframe.utils import registry
from rlframe.utils.errors import CheckpointError, ConfigError, DataError
from rlframe.utils.registry import find
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout import Layout, record
from rlframe.weight_sync.transports.base import PACKAGE as TRANSPORTS
from rlframe.weight_sync.transports.base import RankInfo, find_transport

DISTRIBUTED_CHECKPOINT = (".metadata", "metadata.json")
"""Files that every Megatron distributed checkpoint has."""


def checked(values: Mapping[str, Any]) -> RunConfig:
    """The RunConfig in `values`, free of faults.

    Raises:
        ConfigError: every fault of building it and of `check`. Where a section cannot be built, the rules that need
            nothing of it are still looked at.
    """
    try:
        run = to_run(values)
    except ConfigError as error:
        raise ConfigError(error.faults + _faults_elsewhere(values, error.faults)) from None
    check(run)
    return run


def check(run: RunConfig) -> None:
    """Refuses a configuration whose parts do not go together, before any process starts.

    Reads the model's config.json (downloading a hub model), the whole dataset and the reward functions.

    Raises:
        ConfigError: every fault, each with its dotted key, the rule, the value and what to do.
    """
    if faults := _faults(run, faulty=frozenset()):
        raise ConfigError(faults)


def _faults(run: RunConfig, *, faulty: Set[str]) -> list[str]:
    """Faults of the topics that need no section of `faulty`."""
    return [fault for topic, sections in TOPICS.items() if not faulty & sections for fault in topic(run)]


def _faults_elsewhere(values: Mapping[str, Any], known: list[str]) -> list[str]:
    """Faults in the sections that no fault of `known` speaks of; the others are put back to their defaults."""
    faulty = {re.split(r"\W", fault, maxsplit=1)[0] for fault in known}
    rest = {key: value for key, value in values.items() if key not in faulty}
    algorithm = values.get("algorithm")
    if "algorithm" in faulty and isinstance(algorithm, Mapping):
        rest["algorithm"] = {"name": algorithm.get("name")}
    try:
        return _faults(to_run(rest), faulty=faulty)
    except ConfigError:
        return []


def _online(run: RunConfig) -> bool:
    return _algorithm(run).online


def _algorithm(run: RunConfig) -> Algorithm:
    component, _ = find("rlframe.algorithms", run.algorithm.name, key="algorithm.name")
    return component(run.algorithm)


def _critic_of(run: RunConfig) -> Algorithm | None:
    """How the run trains its critic, if it has one."""
    algorithm = _algorithm(run)
    return algorithm.critic if isinstance(algorithm, OnlineAlgorithm) else None


def _architecture(run: RunConfig) -> tuple[Architecture | None, list[str]]:
    """What the model is made of, or None and why that is not known."""
    try:
        folder = hub.resolve(run.model)
        architecture = hub.load_family(folder).architecture(hub.read_config(folder))
        return architecture.with_outputs(_algorithm(run).model_outputs), []
    except ConfigError as error:
        return None, error.faults
    except CheckpointError as error:
        return None, [str(error)]


def _model(run: RunConfig) -> list[str]:
    """The model is there, and a family knows it."""
    return _architecture(run)[1]


def _parallel(run: RunConfig) -> Iterator[str]:
    """The layout divides the model."""
    architecture, _ = _architecture(run)
    parallel = Parallel.parse(run.train.parallel)
    if architecture:
        yield from shards.faults(architecture, **asdict(parallel))


def _batch(run: RunConfig) -> Iterator[str]:
    """Every optimizer step gets whole groups and every data-parallel rank at least one sequence."""
    dp = Parallel.parse(run.train.parallel).dp
    group_size, minibatches = (_algorithm(run).group_size, run.train.minibatches) if _online(run) else (1, 1)
    if run.prompts_per_step % minibatches:
        below = run.prompts_per_step // minibatches * minibatches
        fitting = [str(count) for count in (below, below + minibatches) if count]
        yield (
            f"prompts_per_step must be a multiple of train.minibatches={minibatches} so that groups stay whole, got "
            f"{run.prompts_per_step} (with algorithm.group_size={group_size}: {run.prompts_per_step * group_size} "
            f"sequences a step); {' or '.join(fitting)} fits"
        )
    algorithm = _algorithm(run)
    if isinstance(algorithm, OfflineAlgorithm) and run.prompts_per_step < algorithm.smallest_step:
        yield (
            f"prompts_per_step must be at least {algorithm.smallest_step} with algorithm.name={run.algorithm.name}, "
            f"got {run.prompts_per_step}: each prompt is compared with the response of another of the step"
        )
    sequences = run.prompts_per_step * group_size // minibatches
    if sequences < dp:
        prompts = -(-dp // group_size) * minibatches
        yield (
            f"prompts_per_step={run.prompts_per_step} * group size {group_size} / train.minibatches={minibatches} "
            f"gives {sequences} sequences for each optimizer step, fewer than the {dp} data-parallel ranks of "
            f"train.parallel={run.train.parallel}; prompts_per_step={prompts} fits"
        )


def _devices(run: RunConfig) -> Iterator[str]:
    """Enough CUDA devices on this machine. On CPU ranks share cores, and a joined cluster counts its own devices."""
    if run.cluster.device is Device.CUDA and not torch.cuda.is_available():
        yield "cluster.device must be cpu or auto on a machine without a CUDA device, got cuda"
        return
    joins = run.cluster.address or os.environ.get("RAY_ADDRESS")
    if joins or run.cluster.device is Device.CPU or not torch.cuda.is_available():
        return
    roles = {
        "num_ranks": Parallel.parse(run.train.parallel).world,
        "num_engines": run.rollout.num_engines if _online(run) else 0,
        "devices_per_engine": run.rollout.devices_per_engine,
        "colocate": run.cluster.colocate,
        "beside": models_beside(run, has_critic=_critic_of(run) is not None),
    }
    if (needed := count_devices(**roles)) > torch.cuda.device_count():
        yield (
            f"{describe(**roles)} need {needed} CUDA devices, this machine has {torch.cuda.device_count()}; make them "
            "smaller or set cluster.address"
        )


def _engine(run: RunConfig) -> Iterator[str]:
    """The engine can hold the model."""
    architecture, _ = _architecture(run)
    if architecture and _online(run):
        yield from run.rollout.faults(architecture)


def _transport(run: RunConfig) -> Iterator[str]:
    """A transport that was asked for can reach from trainer to engines on such devices, were they all on one host."""
    wish = run.weight_sync.transport
    if not _online(run) or wish not in registry.names(TRANSPORTS):
        return
    cuda = _on_cuda(run)
    trainer, engine = (RankInfo(host="here", device=f"GPU {pid}" if cuda else "cpu", pid=pid) for pid in (0, 1))
    if refusal := find_transport(wish).refusal(trainer, engine):
        yield (
            f"weight_sync.transport={wish} cannot work with cluster.device={run.cluster.device} here: {refusal}; auto "
            "chooses one that can"
        )


def _tokens(run: RunConfig) -> Iterator[str]:
    """The longest rollout fits one packed forward and the model's positions."""
    if not _online(run):
        return
    architecture, _ = _architecture(run)
    cp = Parallel.parse(run.train.parallel).cp
    of_ranks = f" * {cp} context-parallel ranks" if cp > 1 else ""
    limits = {f"train.max_tokens_per_microbatch{of_ranks}": run.train.sequence_tokens}
    if architecture:
        limits["the model's positions"] = architecture.max_positions
    if run.rollout.sequence_tokens is not None:
        limits["the engine's longest sequence, rollout.max_model_len"] = run.rollout.sequence_tokens
    responses = {"rollout.max_tokens": run.rollout.max_tokens}
    if run.evaluation.max_tokens is not None:
        responses["evaluation.max_tokens"] = run.evaluation.max_tokens
    for key, tokens in responses.items():
        for limit, most in limits.items():
            if run.data.max_prompt_tokens + tokens > most:
                yield (
                    f"data.max_prompt_tokens={run.data.max_prompt_tokens} + {key}={tokens} must be at most {limit} "
                    f"({most}), got {run.data.max_prompt_tokens + tokens} tokens; lower one of the two"
                )


def _data(run: RunConfig) -> Iterator[str]:
    """The records can be read, and every setting has a use."""
    yield from check_data.setting_faults(run.data, _algorithm(run), name=run.algorithm.name)
    try:
        check_data.read_all(run.data, _algorithm(run), seed=run.seed)
    except ConfigError as error:
        yield from error.faults
    except DataError as error:
        yield f"data: {error}"


def _packages(run: RunConfig) -> Iterator[str]:
    """What the run was asked to use is installed."""
    engine = run.rollout.name
    if engine in check_teacher.ENGINES_WITH_EXTRA and missing(engine):
        yield f'rollout.name={engine} needs the package {engine}: pip install "rlframe[{engine}]"'
    loggers = {"logging.wandb_project": "wandb", "logging.mlflow_experiment": "mlflow"}
    for key, package in loggers.items():
        if getattr(run.logging, key.removeprefix("logging.")) and missing(package):
            yield f"{key} needs the package {package}: pip install {package}, or set the key to null"


def missing(package: str) -> bool:
    """Whether a package is not installed."""
    return importlib.util.find_spec(package) is None


def _optimizer(run: RunConfig) -> Iterator[str]:
    """Settings of the schedule that the chosen schedule looks at."""
    optimizer = run.train.optimizer
    if optimizer.schedule is Schedule.CONSTANT:
        for name in ("min_lr", "decay_steps"):
            if getattr(optimizer, name):
                yield (
                    f"train.optimizer.{name} has no effect with schedule=constant, got {getattr(optimizer, name)}; "
                    "remove it or choose linear, cosine or wsd"
                )
    elif optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        yield (
            f"train.optimizer.decay_steps must be above warmup_steps={optimizer.warmup_steps}, got "
            f"{optimizer.decay_steps}"
        )


def _lora(run: RunConfig) -> Iterator[str]:
    """Adapters find their matrices, and an adapter to go on from is of these settings."""
    lora, (architecture, _) = run.train.lora, _architecture(run)
    if lora is None or architecture is None:
        return
    family, parallel = hub.load_family(hub.resolve(run.model)), Parallel.parse(run.train.parallel)
    tensors = family.tensors(architecture)
    boxes = whole_layout(family, architecture).boxes
    homes = {name: pieces[0].parameter for name, pieces in boxes.items()}
    yield from lora_faults(
        lora,
        homes,
        {name: len(shape) for name, shape in tensors.items()},
        vocabulary_fits=architecture.vocab_size % parallel.tp == 0,
    )
    if lora.path is None:
        return
    expected = {adapters.key(name, half): shape for name, half, shape in lora_trained(lora, homes, tensors)}
    try:
        for fault in adapters.faults(Path(lora.path), expected, rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora):
            yield f"train.lora.path={lora.path} {fault}"
    except CheckpointError as error:
        yield f"train.lora.path: {error}"


def whole_layout(family: Family, architecture: Architecture) -> Layout:
    """Where the checkpoint's tensors lie when one rank holds the whole model."""
    (shard,) = shards.shards_of_rank(architecture, 0)
    shapes = family.parameters(architecture, shard)
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return record(
        partial(family.load, architecture=architecture, shard=shard), parameters, family.tensors(architecture)
    )


def _training(run: RunConfig) -> Iterator[str]:
    """Options of training that the model, the devices and the algorithm have a use for."""
    architecture, _ = _architecture(run)
    cuda = _on_cuda(run)
    yield from check_train.device_faults(run.train, cuda=cuda)
    if architecture:
        yield from _algorithm(run).faults(hidden_size=architecture.hidden_size)
        yield from check_train.model_faults(run.train, architecture)
    yield from check_train.expert_faults(run.train, online=_online(run))
    yield from check_train.adapter_faults(run.train)


def _on_cuda(run: RunConfig) -> bool:
    """Whether models and engines run on CUDA."""
    return run.cluster.device is not Device.CPU and torch.cuda.is_available()


def _routes(run: RunConfig) -> Iterator[str]:
    """Engines can say which experts the policy's routers are to choose."""
    cuda = _on_cuda(run)
    yield from check_routes.faults(run, _algorithm(run), cuda=cuda)


def _sleep(run: RunConfig) -> Iterator[str]:
    """Models that are to make room have somebody to make it for."""
    critic = _critic_of(run) is not None
    by_critic = critic and run.critic.colocate
    yield from check_train.sleep_faults(run.train, online=_online(run), shared=run.cluster.colocate or by_critic)
    if critic and run.critic.train:
        yield from check_critic.sleep_faults(run)


CRITIC_RULES = (_model, _parallel, _batch, _tokens, _optimizer, _lora, _training)
"""Topics of the policy's model and settings that are the critic's too."""


def _critic(run: RunConfig) -> Iterator[str]:
    """The critic's settings have a use, and obey the rules of the policy's."""
    algorithm = _algorithm(run)
    if _critic_of(run) is None:
        yield from check_critic.unused_faults(run)
        return
    assert isinstance(algorithm, OnlineAlgorithm)
    yield from check_critic.faults(run, algorithm, rules=CRITIC_RULES)
    ours, theirs = _architecture(run)[0], _architecture(check_critic.as_policy(run))[0]
    if ours and theirs and ours.vocab_size != theirs.vocab_size:
        yield (
            f"critic.model.path={run.critic_model.path} must have the vocabulary of model.path={run.model.path}, whose "
            f"tokens it judges, got {theirs.vocab_size} tokens and not {ours.vocab_size}"
        )


def _evaluation(run: RunConfig) -> Iterator[str]:
    """Evaluation has something to evaluate on."""
    if not run.data.holds_out and run.evaluation.every_steps:
        why = "data.evaluation_count=0"
        if run.data.evaluation_count:
            why = "data.streaming=true and no data.evaluation_path"
        yield (
            f"evaluation.every_steps has no effect with {why}, got {run.evaluation.every_steps}; hold out records or "
            "set it to 0"
        )


def _reward(run: RunConfig) -> Iterator[str]:
    """Every reward can be built."""
    return check_reward.faults(run)


def _reward_model(run: RunConfig) -> Iterator[str]:
    """The reward model can read and score what the policy writes."""
    return check_reward.model_faults(run)


def _learning(run: RunConfig) -> Iterator[str]:
    """An algorithm that learns from rewards has one, and the run has a use for the options of policy gradients."""
    if _online(run) and _algorithm(run).needs_rewards and not run.reward.names:
        yield (
            "reward.parts must name a reward, or reward.model.path a reward model: algorithm.name="
            f"{run.algorithm.name} learns from nothing else"
        )
    algorithm = run.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        return
    updates = run.train.minibatches * run.train.epochs
    dual_clip = algorithm.dual_clip if isinstance(algorithm, ClippedConfig) else None
    if dual_clip is not None and updates == 1 and not algorithm.correction.bypass:
        yield (
            f"algorithm.dual_clip has no effect with train.minibatches * train.epochs = 1, got {dual_clip}: the ratio "
            "to the old policy is 1; remove it"
        )
    dynamic = algorithm.dynamic_sampling
    if dynamic and dynamic.reward_part is not None and dynamic.reward_part not in run.reward.names:
        yield (
            f"algorithm.dynamic_sampling.reward_part must be one of reward.parts, {', '.join(run.reward.names)}, got "
            f"{dynamic.reward_part!r}"
        )


def _offline(run: RunConfig) -> Iterator[str]:
    """Settings that only online algorithms look at."""
    if _online(run):
        return
    settings = {
        "train.minibatches": (run.train.minibatches, 1),
        "train.epochs": (run.train.epochs, 1),
        "evaluation.max_tokens": (run.evaluation.max_tokens, None),
        "reward.parts": (sorted(run.reward.parts), []),
        "reward.model.path": (run.reward.model and run.reward.model.path, None),
        "rollout.num_engines": (run.rollout.num_engines, 1),
        "cluster.colocate": (run.cluster.colocate, True),
    }
    unused_sync = WeightSyncConfig()
    settings |= {
        f"weight_sync.{field.name}": (getattr(run.weight_sync, field.name), getattr(unused_sync, field.name))
        for field in fields(WeightSyncConfig)
    }
    for key, (value, unused) in settings.items():
        if value != unused:
            yield f"{key} has no effect with algorithm.name={run.algorithm.name}, got {value}; remove it"
    if run.train.lora and _algorithm(run).precomputes_reference:
        yield (
            "algorithm.reference must be live with train.lora, got precomputed: the reference is the model without its "
            "adapters, which the ranks have anyway"
        )


def _teacher(run: RunConfig) -> list[str]:
    """The teacher is there for an algorithm that has one, and speaks the policy's language."""
    return list(check_teacher.faults(run, _algorithm(run)))


def _distillation(run: RunConfig) -> Iterator[str]:
    """The data's responses are learned at the temperature of the trainer's logprobs."""
    if getattr(run.algorithm, "nll_coefficient", 0) and _online(run) and run.rollout.temperature != 1:
        yield (
            f"algorithm.nll_coefficient={run.algorithm.nll_coefficient} needs rollout.temperature=1, got "
            f"{run.rollout.temperature}: logprobs are taken at that temperature, and the likelihood of the data is not"
        )


def _checkpoint(run: RunConfig) -> Iterator[str]:
    """What the run is to start from is there."""
    if run.checkpoint.start_from is None:
        return
    folder = Path(run.checkpoint.start_from).expanduser()
    if missing := [name for name in DISTRIBUTED_CHECKPOINT if not (folder / name).is_file()]:
        yield (
            f"checkpoint.start_from must be the folder of a Megatron distributed checkpoint, got {folder}, which has "
            f"no {' and no '.join(missing)}; a Hugging Face model goes to model.path"
        )


TOPICS = {
    _model: {"model"},
    _parallel: {"model", "train"},
    _batch: {"prompts_per_step", "algorithm", "train"},
    _devices: {"train", "critic", "teacher", "reward", "rollout", "cluster", "algorithm"},
    _engine: {"model", "rollout", "algorithm"},
    _transport: {"weight_sync", "cluster", "algorithm"},
    _tokens: {"model", "data", "rollout", "train", "evaluation"},
    _data: {"data", "seed"},
    _packages: {"rollout", "logging"},
    _optimizer: {"train"},
    _lora: {"model", "train"},
    _training: {"model", "train", "cluster", "algorithm"},
    _routes: {"train", "rollout", "cluster", "algorithm"},
    _sleep: {"train", "critic", "cluster", "algorithm"},
    _critic: {"model", "critic", "train", "data", "rollout", "evaluation", "cluster", "algorithm", "steps"},
    _evaluation: {"data", "evaluation"},
    _reward: {"reward"},
    _reward_model: {"reward", "model", "data", "rollout", "evaluation"},
    _learning: {"algorithm", "train", "reward"},
    _teacher: {"teacher", "algorithm", "model", "train", "data", "rollout"},
    _distillation: {"algorithm", "rollout"},
    _checkpoint: {"checkpoint"},
    _offline: {"algorithm", "train", "evaluation", "reward", "rollout", "cluster", "weight_sync"},
}
"""Each topic, and the sections it looks at."""
