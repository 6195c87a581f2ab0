"""The plan of a run: its processes on their devices, and the seconds of its step."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from rlframe.algorithms.base import Algorithm, OnlineAlgorithm
from rlframe.cluster.roles import CRITIC, ENGINES, JUDGE_ENGINES, POLICY, REWARD_MODEL, TEACHER, TEACHER_ENGINES, Place
from rlframe.data.kinds import find_source
from rlframe.megatron.config.forward_only import forward_only
from rlframe.megatron.config.mtp import MtpMode
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.models.families.base import Architecture
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.config import RolloutConfig
from rlframe.run.config import RunConfig
from rlframe.run.preflight import constants, seconds, turns
from rlframe.run.preflight.devices import Accelerator
from rlframe.run.preflight.engine import EngineMemory, drafter_of
from rlframe.run.preflight.host import HostMemory
from rlframe.run.preflight.parts import DeviceMemory, Phase, Process, total
from rlframe.run.preflight.trainer import TrainerMemory, frozen_process
from rlframe.run.preflight.weights import Counter
from rlframe.run.preflight.workload import Division, Workload, divide, layout_of
from rlframe.run.roles import teacher_engine, topology
from rlframe.run.teacher import TeacherPlacement
from rlframe.types.results import Output
from rlframe.utils.faults import Fault
from rlframe.utils.nested import followed

MAX_LENGTH = 16384
"""Longest response that the estimate assumes where nothing else bounds it."""


Rules = Callable[[RunConfig], list[Fault]]


def no_rules(run: RunConfig) -> list[Fault]:
    """Returns no fault."""
    return []


class Models:
    """The models of a run, each read from its config.json once, however many settings are tried."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str | None, int | None, MtpMode], Counter] = {}

    def counter(self, model: ModelConfig, outputs: int | None = None, *, mtp: MtpMode = MtpMode.DROP) -> Counter:
        """Returns what counts a model's parameters.

        Args:
            mtp: use of the head for multi-token prediction.

        Raises:
            ConfigError, CheckpointError: the model is not there, or its config.json cannot be read.
        """
        key = (model.path, model.revision, outputs, mtp)
        if key not in self._known:
            # With random_init nothing but small files would be downloaded.
            folder = resolve(replace(model, random_init=True))
            family = load_family(folder)
            architecture = family.architecture(read_config(folder)).with_outputs(outputs)
            architecture = architecture.keeping_mtp(mtp is not MtpMode.DROP)
            self._known[key] = Counter(family, architecture, frozen_mtp=mtp is MtpMode.KEEP)
        return self._known[key]


@dataclass(frozen=True)
class Plan:
    """The plan of a run on devices of one kind."""

    run: RunConfig
    algorithm: Algorithm
    accelerator: Accelerator
    workload: Workload
    models: Models
    devices_per_host: int = 8
    rules: Rules = no_rules
    """Returns the faults of another configuration, by which advice is chosen."""

    @cached_property
    def known(self) -> frozenset[str]:
        """The keys of the faults that the configuration has."""
        return frozenset(str(fault.key) for fault in self.rules(self.run))

    @property
    def cuda(self) -> bool:
        """Returns whether it runs on CUDA."""
        return not self.accelerator.is_cpu

    @property
    def critic(self) -> Algorithm | None:
        """The algorithm that trains the critic."""
        return self.algorithm.critic if isinstance(self.algorithm, OnlineAlgorithm) else None

    @property
    def parallel(self) -> Parallel:
        """The policy's layout."""
        return layout_of(self.run.train.parallel)

    @cached_property
    def counter(self) -> Counter:
        """The policy's model."""
        return self.models.counter(self.run.model, self.algorithm.model_outputs, mtp=self.run.train.mtp.mode)

    @property
    def architecture(self) -> Architecture:
        """The policy's architecture."""
        return self.counter.architecture

    @cached_property
    def division(self) -> Division:
        """The division of the policy's step."""
        return divide(self.workload, self.run.train)

    @property
    def computes_old_logprobs(self) -> bool:
        """Returns whether the policy computes logprobs of the batch before its first update: a single one would find
        the same (loops/online.py)."""
        algorithm = self.algorithm
        return isinstance(algorithm, OnlineAlgorithm) and self.division.updates > 1 and algorithm.needs_old_logprobs

    @cached_property
    def trainer(self) -> TrainerMemory:
        """A rank of the policy."""
        needs = self.algorithm.requirements
        teacher = self.run.teacher
        inside = teacher and teacher.placement is TeacherPlacement.WORKERS
        # The divergence needs the logits of both models and their gradient apart.
        copies = 3 if self.algorithm.output is Output.DIVERGENCE else 1
        return TrainerMemory(
            role=POLICY,
            train=self.run.train,
            architecture=self.architecture,
            counter=self.counter,
            tokens=self.division.tokens,
            microbatches=self.division.microbatches,
            sequence_tokens=self.workload.sequence_tokens,
            keys_per_token=self.division.keys_per_token,
            logits_copies=copies,
            float32_logits=self.run.model.float32_logits,
            forward_passes=self.computes_old_logprobs or needs.reference or bool(teacher),
            merges=self.run.sends_merged(online=self.algorithm.online),
            cuda=self.cuda,
            quantizes=self.workload.sampled and self.run.rollout.engine_format is not EngineFormat.NONE,
            teacher_bytes=self._frozen_bytes(teacher.model) if inside and teacher else 0.0,
        )

    @cached_property
    def critic_trainer(self) -> TrainerMemory | None:
        """A rank of the critic."""
        if self.critic is None:
            return None
        division = divide(self.workload, self.run.critic_train)
        counter = self.models.counter(self.run.critic_model, self.critic.model_outputs)
        return TrainerMemory(
            role=CRITIC, train=self.run.critic_train, architecture=counter.architecture, counter=counter,
            tokens=division.tokens, microbatches=division.microbatches,
            sequence_tokens=self.workload.sequence_tokens, keys_per_token=division.keys_per_token,
            forward_passes=False, merges=False, cuda=self.cuda, phase=Phase.CRITIC,
        )  # fmt: skip

    @cached_property
    def engine(self) -> EngineMemory | None:
        """A device of the policy's engines."""
        if not self.workload.sampled:
            return None
        return self._engine(ENGINES, self.run.rollout, self.run.model, shares=self.run.cluster.colocate)

    @property
    def num_samplers(self) -> int:
        """Number of the policy's engines that sample; the others only evaluate."""
        return max(1, self.run.rollout.num_engines - self.run.evaluation.num_engines)

    def _engine(self, role: str, config: RolloutConfig, model: ModelConfig, *, shares: bool) -> EngineMemory:
        counter = self.models.counter(model, self.algorithm.model_outputs if role == ENGINES else None)
        (whole,) = counter.stages(Parallel())
        return EngineMemory(
            role=role,
            config=config,
            architecture=counter.architecture,
            parameters=whole.all,
            device_bytes=self.accelerator.memory_bytes,
            train_itemsize=2 if self.run.train.dtype == Dtype.BFLOAT16 else 4,
            sequences=-(-self.workload.sequences // (self.num_samplers if role == ENGINES else config.num_engines)),
            sequence_tokens=self.workload.prompt_tokens + self.workload.longest_response,
            cuda=self.cuda,
            shares=shares and self.cuda,
            drafter=drafter_of(config, model, self.models.counter),
        )

    def _inside(self, model: ModelConfig) -> Parallel:
        """Returns the layout of a teacher in the policy's ranks."""
        experts = self.models.counter(model).architecture.num_experts
        return self.parallel if experts else replace(self.parallel, ep=1, etp=1)

    def _frozen_bytes(self, model: ModelConfig) -> float:
        size = 2 if self.run.train.dtype == Dtype.BFLOAT16 else 4
        return max(stage.all for stage in self.models.counter(model).stages(self._inside(model))) * size

    def layouts(self) -> Iterator[tuple[Architecture, Parallel]]:
        """Yields the layout of every model in ranks: of the policy, the critic, a teacher and a reward model."""
        run, models = self.run, self.models
        yield self.architecture, self.parallel
        if self.critic:
            counter = models.counter(run.critic_model, self.critic.model_outputs)
            yield counter.architecture, layout_of(run.critic_train.parallel)
        if run.teacher and (layout := run.teacher.own_layout):
            yield models.counter(run.teacher.model).architecture, layout
        if model := run.reward.model:
            config = ModelConfig(path=model.path, revision=model.revision)
            yield models.counter(config, 1).architecture, Parallel.parse(model.parallel)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a step."""
        sampled = (Phase.GENERATION,) if self.workload.sampled else ()
        synced = (Phase.SYNC,) if self.workload.sampled else ()
        forward = (Phase.LOGPROBS,) if self.trainer.forward_passes or self.run.reward.model else ()
        critic = (Phase.CRITIC,) if self.critic else ()
        return (*sampled, *forward, *critic, Phase.TRAIN, *synced)

    @cached_property
    def devices(self) -> tuple[DeviceMemory, ...]:
        """The devices by what shares them, those of the policy first."""
        online = self.workload.sampled
        roles = topology(self.run, online=online, has_critic=self.critic is not None)
        processes = dict(self._processes())
        shared = [processes[role.name] for role in roles.roles if role.place is not Place.OWN]
        found = [DeviceMemory(count=roles.num_shared, processes=tuple(shared), phases=self.phases)]
        for role in roles.roles:
            if role.place is Place.OWN:
                found.append(
                    DeviceMemory(count=role.num_devices, processes=(processes[role.name],), phases=self.phases)
                )
        return tuple(found)

    def _processes(self) -> Iterator[tuple[str, Process]]:
        run, tokens = self.run, self.division.tokens
        yield POLICY, self.trainer.process()
        if self.critic_trainer:
            yield CRITIC, self.critic_trainer.process()
        if self.engine:
            yield ENGINES, self.engine.process()
        if run.teacher and (layout := run.teacher.own_layout):
            yield TEACHER, self._frozen(TEACHER, run.teacher.model, layout, tokens, outputs=None)
        if run.teacher and (engine := teacher_engine(run)):
            yield TEACHER_ENGINES, self._engine(TEACHER_ENGINES, engine, run.teacher.model, shares=False).process()
        if run.judge:
            yield JUDGE_ENGINES, self._engine(JUDGE_ENGINES, run.judge.engine, run.judge.model, shares=False).process()
        if model := run.reward.model:
            config = ModelConfig(path=model.path, revision=model.revision)
            yield REWARD_MODEL, self._frozen(REWARD_MODEL, config, Parallel.parse(model.parallel), tokens, outputs=1)

    def _frozen(self, role: str, model: ModelConfig, layout: Parallel, tokens: int, *, outputs: int | None) -> Process:
        train = forward_only(self.run.train, layout)
        return frozen_process(
            role,
            self.models.counter(model, outputs),
            train,
            tokens=tokens,
            sequence_tokens=self.workload.sequence_tokens,
            cuda=self.cuda,
        )

    @property
    def worst(self) -> DeviceMemory:
        """The device that takes most."""
        return max(self.devices, key=lambda device: device.peak_bytes)

    @property
    def missing_bytes(self) -> float:
        """Bytes by which the worst device's peak exceeds its memory; negative if it fits."""
        return self.worst.peak_bytes - self.accelerator.memory_bytes

    @property
    def certainly_missing_bytes(self) -> float:
        """The same without the parts of which only the order of magnitude is known."""
        peaks = (device.certain_bytes_at(phase) for device in self.devices for phase in device.phases)
        return max(peaks) - self.accelerator.memory_bytes

    @property
    def fits(self) -> bool:
        """Returns whether every phase fits every device, and engines have a cache for at least one sequence."""
        return self.missing_bytes <= 0 and self.engine_fits

    @property
    def engine_fits(self) -> bool:
        """Returns whether an engine's claim holds its weights and the keys and values of one sequence."""
        return self.engine is None or self.engine.cache_tokens >= self.engine.sequence_tokens

    @cached_property
    def host(self) -> HostMemory:
        """The memory of a host."""
        return HostMemory(
            run=self.run,
            algorithm=self.algorithm,
            policy=self.trainer,
            critic=self.critic_trainer,
            ranks=self.devices_per_host,
            engine=self.engine,
        )

    @property
    def resident_bytes(self) -> float:
        """Bytes that all processes hold for certain, on all devices: weights, gradients, optimizer."""
        return sum(total(process.resident) * device.count for device in self.devices for process in device.processes)

    @cached_property
    def step_seconds(self) -> dict[str, float]:
        """Seconds of a step by phase. Empty if the device's speeds are not known."""
        if self.accelerator.speeds is None:
            return {}
        found = dict(self._sampling_seconds()) if self.engine else {}
        policy = self.timed(self.trainer, self.division)
        one_pass = self._over_batch(policy, self.division, self.run.train)
        forward = float(self.computes_old_logprobs)
        forward += float(self.algorithm.needs_reference and not self.algorithm.precomputes_reference)
        if forward:
            # The reference's weights go there and back.
            found["logprobs"] = forward * one_pass + 2 * self.host.reference_bytes / constants.REFERENCE_BANDWIDTH
        for model, outputs, layout in self._frozen_in_ranks():
            found["logprobs"] = found.get("logprobs", 0.0) + self._frozen_seconds(model, outputs, layout)
        found["train"] = self.update_seconds + constants.CALL_S
        found["train"] += one_pass if self.algorithm.needs_entropies else 0.0
        if self.critic_trainer:
            division = divide(self.workload, self.run.critic_train)
            critic = self.timed(self.critic_trainer, division)
            # Values of the batch, then its updates.
            found["critic"] = self._over_batch(critic, division, self.run.critic_train)
            found["critic"] += division.updates * critic.optimizer_step() + constants.CALL_S
        for phase, changing in turns.changes(self._turns(found), self._sleepers()).items():
            found[phase] += changing
        return found

    def _frozen_in_ranks(self) -> Iterator[tuple[ModelConfig, int | None, Parallel]]:
        """Yields the teacher and the reward model that see the whole batch in ranks, their outputs and layouts."""
        teacher, reward = self.run.teacher, self.run.reward.model
        if teacher and teacher.placement is not TeacherPlacement.ENGINE:
            yield teacher.model, None, teacher.own_layout or self._inside(teacher.model)
        if reward and self.workload.sampled:
            model = ModelConfig(path=reward.path, revision=reward.revision)
            yield model, 1, Parallel.parse(reward.parallel)

    def _frozen_seconds(self, model: ModelConfig, outputs: int | None, layout: Parallel) -> float:
        """Returns the seconds of a frozen model's forward pass over the batch."""
        train = forward_only(self.run.train, layout)
        counter, division = self.models.counter(model, outputs), divide(self.workload, train)
        memory = TrainerMemory(
            role=TEACHER, train=train, architecture=counter.architecture, counter=counter, tokens=division.tokens,
            microbatches=division.microbatches, sequence_tokens=self.workload.sequence_tokens, cuda=self.cuda,
        )  # fmt: skip
        return self._over_batch(self.timed(memory, division), division, train)

    @property
    def update_seconds(self) -> float:
        """Seconds of the policy's optimizer steps. The device's speeds must be known."""
        return self.division.updates * self.timed(self.trainer, self.division).optimizer_step()

    @staticmethod
    def _over_batch(timed: seconds.TrainerSeconds, division: Division, train: TrainConfig) -> float:
        """Returns the seconds of one forward pass over the batch, whose parts are those of the optimizer steps."""
        return division.updates / train.epochs_per_batch * timed.passes(backward=False) + constants.CALL_S

    def _turns(self, phases: Iterable[str]) -> Iterator[turns.Turn]:
        """Yields who works when in a step, see loops/online.py."""
        on = {"generation": ENGINES, "logprobs": POLICY, "critic": CRITIC, "train": POLICY, "weight sync": ENGINES}
        for phase in on:
            if phase in phases:
                yield turns.Turn(phase=phase, role=on[phase], wakes=phase != "weight sync")

    def _sleepers(self) -> dict[str, turns.Sleeper]:
        """Returns the roles that sleep, as run/compose chooses them."""
        found = {}
        if self.engine and self.engine.sleeps:
            found[ENGINES] = turns.of_engine(self.engine)
        if self.run.train.sleeps:
            found[POLICY] = turns.of_trainer(self.trainer)
        if self.critic_trainer and self.run.critic_train.sleeps:
            found[CRITIC] = turns.of_trainer(self.critic_trainer)
        return found

    @property
    def total_seconds(self) -> float:
        """Seconds of a step: phases in turns, or sampling beside the rest."""
        found = self.step_seconds
        beside = found.get("generation", 0.0)
        rest = sum(found.values()) - beside
        ahead = self.run.loop.max_policy_lag > 0 and not self.run.cluster.colocate
        return max(beside, rest) if ahead else beside + rest

    def timed(self, memory: TrainerMemory, division: Division) -> seconds.TrainerSeconds:
        """Returns what times a role that trains. The device's speeds must be known."""
        assert self.accelerator.speeds is not None
        parallel = memory.parallel
        return seconds.TrainerSeconds(
            memory=memory,
            speeds=self.accelerator.speeds,
            tokens=division.mean_tokens,
            mean_length=self.workload.sequence_tokens,
            predicted=division.predicted,
            spans_hosts=parallel.ep * parallel.etp * parallel.tp > self.devices_per_host
            or (parallel.world > self.devices_per_host),
        )

    def _sampling_seconds(self) -> Iterator[tuple[str, float]]:
        assert self.engine is not None and self.accelerator.speeds is not None
        work, engine = self.workload, self.engine
        layers = tuple(range(engine.architecture.num_layers))
        count = seconds.operations(engine.architecture, layers, mean_length=0.0, last=False)
        responses = seconds.Responses(
            sequences=engine.sequences,
            prompt_tokens=work.prompt_tokens,
            tokens=work.response_tokens,
            longest=work.longest_response,
            group=work.group if getattr(engine.config, "enable_prefix_caching", False) else 1,
        )
        yield "generation", seconds.generation(engine, self.accelerator.speeds, responses, count.all)
        sync = seconds.sync(
            engine,
            self.accelerator.speeds,
            colocated=self.run.cluster.colocate,
            same_host=self.num_devices <= self.devices_per_host,
            sources=self.parallel.world,
        )
        yield "weight sync", sync + (turns.weights_wake(engine) if engine.sleeps else 0.0)

    @property
    def num_devices(self) -> int:
        """Devices of the run."""
        return sum(device.count for device in self.devices)


def plan(
    run: RunConfig,
    algorithm: Algorithm,
    accelerator: Accelerator,
    *,
    response_tokens: int | None = None,
    prompt_tokens: int | None = None,
    models: Models | None = None,
    devices_per_host: int = 8,
    rules: Rules = no_rules,
) -> Plan:
    """Returns the plan of a run.

    Args:
        response_tokens: mean tokens of a response; None means rollout.max_tokens.
        prompt_tokens: mean tokens of a prompt; None means data.max_prompt_tokens.
        models: models that other plans have read.
        rules: returns the faults of a configuration; advice that has new ones is not given.
    """
    sampled = algorithm.online and run.rollout.replay is None
    longest = min(run.rollout.max_tokens, run.train.sequence_tokens)
    group = algorithm.group_size if algorithm.online else sequences_per_item(algorithm)
    if algorithm.online:
        prompt = prompt_tokens or min(run.data.max_prompt_tokens, max(1, run.train.sequence_tokens - longest))
        response = response_tokens or longest
    else:
        # Given sequences: nothing but the budget of an item bounds them.
        whole = min(run.train.sequence_tokens, MAX_LENGTH) // group
        prompt = prompt_tokens or (0 if response_tokens else whole)
        response = response_tokens or 0
    workload = Workload(
        prompts=run.prompts_per_step,
        group=group,
        prompt_tokens=prompt,
        response_tokens=response,
        longest_response=max(longest, response) if algorithm.online else response,
        sampled=sampled,
    )
    return Plan(run, algorithm, accelerator, workload, models or Models(), devices_per_host, rules)


def sequences_per_item(algorithm: Algorithm) -> int:
    """Returns the sequences that most items of an offline algorithm's data have, such as 2 for a pair."""
    kind = algorithm.requirements.data
    return find_source(kind).sequences_per_item if kind else 1


def with_run(found: Plan, run: RunConfig) -> Plan:
    """Returns the plan of another run of the same algorithm, on the same devices with the same lengths. What changes in
    `train` changes for a critic that has the same, as where a configuration is read."""
    if run.critic.train is not None:
        train = followed(run.critic.train, found.run.train, run.train)
        run = replace(run, critic=replace(run.critic, train=train))
    return Plan(
        run, found.algorithm, found.accelerator, found.workload, found.models, found.devices_per_host, found.rules
    )
