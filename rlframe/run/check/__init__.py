"""Rules across components, by topic. Each topic checks one subject and yields its faults; `check` reports all
together."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.cluster.config import Device
from rlframe.run.check import alerts, batch, data, effect, loop, model, modes, profile, replay, sharing, train
from rlframe.run.check.context import algorithm_of, architecture_of, critic_of, device_of, online
from rlframe.run.check.engines import adapters, exact, float32_logits, quantized, routes, speculative
from rlframe.run.check.machines import cluster, devices, memory
from rlframe.run.check.roles import critic, judge, reward, teacher
from rlframe.run.config import Mode, RunConfig
from rlframe.run.load import to_run
from rlframe.utils.bounds import shortened
from rlframe.utils.build import as_dict
from rlframe.utils.errors import ConfigError, DataError
from rlframe.utils.faults import Fault


def checked(values: Mapping[str, Any]) -> RunConfig:
    """Returns the RunConfig in `values` after checking it.

    Raises:
        ConfigError: every fault of building it and of `check`. If a section cannot be built, the rules that do not need
            it are still checked.
    """
    try:
        run = to_run(values)
    except ConfigError as error:
        raise ConfigError(error.faults + _faults_elsewhere(values, error.faults)) from None
    if faults := _faults(run, faulty=frozenset()):
        raise ConfigError(faults)
    return run


def check(run: RunConfig) -> RunConfig:
    """Refuses a configuration with a wrong value, or whose parts do not fit together, before any process starts.

    Reads the model's config.json (downloading a hub model), the whole dataset and the reward functions.

    Returns:
        The configuration that a file with the same values would give, to run: what a program has assigned is of no
        type yet.

    Raises:
        ConfigError: every fault, each with its dotted key, the rule, the value and what to do.
    """
    if not isinstance(values := as_dict(run), Mapping):
        hint = "rlframe.load(NAME, OVERRIDES) gives one"
        raise ConfigError([Fault("config", "must be a RunConfig", got=shortened(run), hint=hint)])
    return checked(values)


def check_device(run: RunConfig) -> None:
    """Refuses what does not work on `cluster.device`, which a joined cluster has decided after `check`.

    Raises:
        ConfigError: every fault.
    """
    concerned = topics_of(run)
    if faults := [fault for topic in OF_DEVICE if topic in concerned for fault in topic(run)]:
        raise ConfigError(faults)


def planned_faults(run: RunConfig) -> list[Fault]:
    """Returns every fault that a machine can see that has the model's config.json, but not its weights, the data or the
    devices."""
    return _of(run, topics_of(run) - OF_THIS_MACHINE)


def faults_of_settings(run: RunConfig) -> list[Fault]:
    """Returns the `planned_faults` that take no process, for the many configurations among which advice is chosen."""
    return _of(run, topics_of(run) - OF_THIS_MACHINE - {loop.environment})


def _of(run: RunConfig, concerned: Set[Any]) -> list[Fault]:
    return [fault for topic in TOPICS if topic in concerned for fault in topic(run)]


def _faults(run: RunConfig, *, faulty: Set[str]) -> list[Fault]:
    """Returns the faults of the topics that concern the run and need no section of `faulty`."""
    concerned = topics_of(run)
    topics = [topic for topic, sections in TOPICS.items() if not faulty & sections and topic in concerned]
    if check_data in concerned and check_data not in topics and not faulty & {"data", "seed"}:
        topics.append(check_reading)
    return [fault for topic in topics for fault in topic(run)]


def topics_of(run: RunConfig) -> Set[Any]:
    """Returns the topics about what the run does. Without ranks that is nothing of training, whose settings are not
    used."""
    if run.trains(online=algorithm_of(run).online):
        return TOPICS.keys() - (OF_SAMPLING if run.rollout.replay else frozenset())
    reads_data = run.mode is Mode.EVALUATE and run.data.holds_out
    return WITHOUT_TRAINING | ({check_data} if reads_data else frozenset())


def _faults_elsewhere(values: Mapping[str, Any], known: list[Fault]) -> list[Fault]:
    """Returns the faults in the sections that no fault of `known` concerns. The other sections are reset to their
    defaults, which are no values of the user's, except for what decides which rules there are. Without a mode nobody
    knows them."""
    faulty = {fault.section for fault in known}
    if "mode" in faulty:
        return []
    rest = {key: value for key, value in values.items() if key not in faulty}
    for section, name in DECIDING.items():
        if section in faulty and isinstance(own := values.get(section), Mapping):
            rest[section] = {name: own.get(name)}
    return _faults_without(rest, faulty)


def _faults_without(rest: Mapping[str, Any], faulty: Set[str]) -> list[Fault]:
    try:
        return _faults(to_run(rest), faulty=faulty)
    except ConfigError:
        return []


def check_data(run: RunConfig) -> Iterator[Fault]:
    """Checks that the records can be read and that every data setting has an effect."""
    yield from data.setting_faults(run.data, algorithm_of(run), name=run.algorithm.name)
    readings, faults = _readings(run)
    yield from faults
    if faults:
        return
    yield from data.nothing_to_judge(
        readings,
        reward.needing_answers(run),
        what=run.data.what,
        settings=run.algorithm,
        names=run.data.labels,
    )
    yield from data.template_faults(run, readings, generation_prompt=online(run))


def check_reading(run: RunConfig) -> list[Fault]:
    """Checks that the records can be read, where the rest of `check_data` cannot be judged."""
    return _readings(run)[1]


def _readings(run: RunConfig) -> tuple[Sequence[Any], list[Fault]]:
    """Returns the readings of the data, or why there are none."""
    try:
        return data.read_all(run.data, algorithm_of(run), seed=run.seed), []
    except ConfigError as error:
        return [], error.faults
    except DataError as error:
        return [], [Fault("data", said=error)]


def check_training(run: RunConfig) -> Iterator[Fault]:
    """Checks the options of training against the model, the devices and the algorithm."""
    architecture, _ = architecture_of(run)
    if (device := device_of(run)) is not Device.AUTO:
        yield from train.device_faults(run.train, cuda=device is Device.CUDA)
    if architecture:
        yield from algorithm_of(run).faults(hidden_size=architecture.hidden_size)
        yield from train.model_faults(run.train, architecture)
    yield from sharing.faults(
        run.train, algorithm_of(run), architecture, name=run.algorithm.name, cuda=device is Device.CUDA
    )
    yield from train.expert_faults(run.train, online=online(run))
    yield from train.adapter_faults(run.train)


def check_routes(run: RunConfig) -> Iterator[Fault]:
    """Checks that engines can return the routed experts that the policy's routers replay."""
    if (device := device_of(run)) is not Device.AUTO:
        yield from routes.faults(run, algorithm_of(run), cuda=device is Device.CUDA)


def check_exact(run: RunConfig) -> Iterator[Fault]:
    """Checks that engines and trainer can agree exactly, if they must."""
    if online(run) and (device := device_of(run)) is not Device.AUTO:
        yield from exact.faults(run, cuda=device is Device.CUDA)


def check_speculative(run: RunConfig) -> Iterator[Fault]:
    """Checks that engines can decode speculatively, if they must."""
    if online(run) and (device := device_of(run)) is not Device.AUTO:
        yield from speculative.faults(run, cuda=device is Device.CUDA)


def check_critic(run: RunConfig) -> Iterator[Fault]:
    """Checks that the critic's settings have an effect and obey the rules of the policy's settings."""
    algorithm = algorithm_of(run)
    asked = critic_of(run)
    if asked is None:
        yield from critic.unused_faults(run)
        return
    assert isinstance(algorithm, OnlineAlgorithm)
    yield from critic.faults(run, algorithm, rules=CRITIC_RULES)
    ours, theirs = architecture_of(run)[0], architecture_of(critic.as_policy(run))[0]
    if theirs:
        yield from critic.mtp_faults(run, theirs)
    if theirs and run.critic_model != run.model:
        outputs = asked.model_outputs
        yield from model.file_faults(run.critic_model, theirs, num_outputs=outputs, key="critic.model.path")
    if ours and theirs and ours.vocab_size != theirs.vocab_size:
        yield Fault(
            "critic.model.path",
            f"must have the vocabulary of model.path={run.model.path}, whose tokens it values: got "
            f"{theirs.vocab_size} tokens instead of {ours.vocab_size}",
            got=run.critic_model.path,
            stated=True,
        )


def check_reward(run: RunConfig) -> Iterator[Fault]:
    """Checks that every reward can be built."""
    return reward.faults(run)


def check_reward_model(run: RunConfig) -> Iterator[Fault]:
    """Checks that the reward model can read and score the policy's rollouts."""
    return reward.model_faults(run)


def check_judge(run: RunConfig) -> Iterator[Fault]:
    """Checks that the judge can be asked."""
    return judge.faults(run)


def check_teacher(run: RunConfig) -> list[Fault]:
    """Checks that an algorithm that needs a teacher has one, and that it has the policy's tokens."""
    return list(teacher.faults(run, algorithm_of(run)))


CRITIC_RULES = (
    model.model,
    model.parallel,
    batch.batch,
    batch.tokens,
    batch.optimizer,
    model.lora,
    check_training,
    *(need.faults for need in effect.NEEDS if need.sections == {"train"}),
)
"""Topics of the policy's model and settings that apply to the critic too."""

TOPICS = {
    model.model: {"model"},
    model.files: {"model", "algorithm", "train"},
    model.parallel: {"model", "train"},
    batch.batch: {"prompts_per_step", "algorithm", "train"},
    cluster.address: {"cluster"},
    cluster.job_folder: {"output"},
    cluster.variables: {"cluster", "train"},
    cluster.job_environment: {"cluster"},
    devices.devices: {"train", "critic", "teacher", "judge", "reward", "rollout", "cluster", "algorithm", "mode"},
    devices.engine: {"model", "rollout", "algorithm", "train", "cluster"},
    devices.temperatures: {"rollout", "evaluation", "generation", "algorithm", "mode"},
    loop.environment: {"environment", "algorithm", "cluster"},
    devices.transport: {"weight_sync", "rollout", "cluster", "algorithm"},
    batch.tokens: {"model", "data", "rollout", "train", "evaluation", "environment", "generation"},
    check_data: {"data", "seed", "algorithm", "reward", "model", "rollout"},
    data.curriculum_faults: {"data", "reward", "judge", "environment", "steps", "algorithm"},
    devices.packages: {"rollout", "logging", "cluster"},
    alerts.faults: {"alerts", "algorithm"},
    batch.optimizer: {"train"},
    model.lora: {"model", "train"},
    adapters.faults: {"model", "train", "rollout", "weight_sync", "cluster", "algorithm", "mode", "checkpoint"},
    check_training: {"model", "train", "cluster", "algorithm"},
    check_routes: {"train", "rollout", "cluster", "algorithm"},
    check_exact: {"train", "rollout", "cluster", "algorithm"},
    float32_logits.faults: {"model", "train", "rollout", "algorithm", "mode"},
    quantized.faults: {"model", "train", "rollout", "weight_sync", "cluster", "algorithm", "mode"},
    check_speculative: {"train", "rollout", "cluster", "algorithm", "model"},
    devices.sleep: {"train", "critic", "cluster", "algorithm", "rollout"},
    check_critic: {
        *("model", "critic", "train", "data", "rollout", "evaluation", "environment", "generation", "cluster"),
        *("algorithm", "steps", "prompts_per_step"),
    },
    loop.evaluation: {"data", "evaluation"},
    loop.evaluation_engines: {"evaluation", "rollout", "loop", "cluster", "algorithm"},
    check_reward: {"reward", "data", "cluster"},
    check_reward_model: {"reward", "model", "data", "rollout", "evaluation", "environment", "rendering", "train"},
    loop.learning: {"algorithm", "train", "reward", "judge", "loop", "environment", "rollout"},
    loop.lag: {"loop", "cluster", "rollout", "algorithm"},
    loop.oversampling: {"loop", "cluster", "rollout", "algorithm"},
    check_judge: {"judge", "environment", "rendering", "rollout", "algorithm"},
    check_teacher: {"teacher", "algorithm", "model", "train", "data", "rollout", "environment"},
    loop.reference: {"algorithm", "train", "steps"},
    loop.distillation: {"algorithm", "rollout"},
    loop.checkpoint: {"checkpoint", "algorithm", "output", "mode", "train"},
    loop.best_metric: {"checkpoint", "data", "evaluation", "algorithm", "rollout", "reward", "judge", "environment"},
    replay.faults: {
        *("model", "rollout", "algorithm", "environment", "train", "checkpoint", "prompts_per_step", "steps", "output"),
    },
    loop.offline: {"algorithm", "train"},
    memory.faults: set(RunConfig.__dataclass_fields__),
    effect.revisions: {"model", "critic", "teacher", "judge", "reward"},
    modes.mode: {"mode", "data", "evaluation", "algorithm", "rollout", "checkpoint", "self_test"},
    modes.sets: {"mode", "data", "evaluation", "reward", "rollout", "model", "algorithm"},
    modes.prompts: {"mode", "data", "seed", "model", "rollout"},
    profile.processes: profile.SECTIONS,
    profile.device: {"profile", "cluster"},
    profile.nsys: {"profile", "output"},
    **{need.faults: need.sections for need in effect.NEEDS},
}
"""All topics with the sections that they read."""

DECIDING = {"algorithm": "name", "rollout": "replay"}
"""By section, the setting that `topics_of` asks for."""

OF_THIS_MACHINE = frozenset(
    {
        model.files,
        devices.devices,
        devices.transport,
        devices.packages,
        check_data,
        data.curriculum_faults,
        check_reward,
        memory.faults,
        profile.nsys,
    }
)
"""Topics about weights, data, packages and devices, which a machine that only plans need not have."""

OF_SAMPLING = frozenset(
    {
        devices.engine,
        devices.temperatures,
        devices.transport,
        loop.environment,
        check_data,
        data.curriculum_faults,
        check_routes,
        check_reward,
        check_reward_model,
        check_judge,
    }
)
"""Topics about what a replay does not start: engines, data and rewards, which its machine need not have."""

WITHOUT_TRAINING = frozenset(
    {
        model.model,
        model.files,
        cluster.address,
        cluster.job_folder,
        cluster.job_environment,
        devices.devices,
        devices.engine,
        devices.temperatures,
        devices.packages,
        loop.environment,
        batch.tokens,
        check_exact,
        float32_logits.faults,
        quantized.faults,
        check_speculative,
        check_reward,
        check_reward_model,
        check_judge,
        effect.revisions,
        modes.mode,
        modes.sets,
        modes.prompts,
        profile.processes,
        effect.GENERATION.faults,
        effect.SELF_TEST.faults,
    }
)
"""Topics about engines and rewards alone, in the modes that start nothing else."""
OF_DEVICE = (
    devices.engine,
    devices.transport,
    check_training,
    check_routes,
    check_exact,
    quantized.faults,
    check_speculative,
    check_critic,
    profile.device,
    *(need.faults for need in effect.NEEDS if "cluster" in need.beside),
)
"""Topics that depend on the device, which `auto` on a joined cluster leaves open until then."""
