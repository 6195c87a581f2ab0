"""The composition root: from a RunConfig to objects that know nothing of each other. Read top to bottom."""

import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor
from transformers import AutoTokenizer

from rlframe.algorithms.base import Algorithm, OfflineAlgorithm, OnlineAlgorithm
from rlframe.algorithms.gkd import Gkd
from rlframe.cluster import runtime
from rlframe.cluster.config import Device
from rlframe.cluster.placement import Placement, count_devices, reserve
from rlframe.data.kinds import find_stream
from rlframe.data.prompts import PromptStream
from rlframe.loops.checkpointing import TRAINING, Checkpoints, read_state
from rlframe.loops.distillation import MixedSampler, responses
from rlframe.loops.metrics import MetricsLog
from rlframe.loops.offline import OfflineLoop
from rlframe.loops.online import OnlineLoop
from rlframe.loops.phases import Phases, Sleeper
from rlframe.loops.probe import MAX_TOKENS, MIN_SEQUENCES, Probe, probe_sequences
from rlframe.loops.run import RunConfig
from rlframe.loops.sampling import PlainSampler, Sampler
from rlframe.loops.summary import closing_paragraph
from rlframe.megatron import platform
from rlframe.megatron.checkpoint_files import MANIFEST
from rlframe.megatron.layout import Parallel
from rlframe.megatron.policy import PolicyGroup, PolicySetup
from rlframe.megatron.teacher_group import TeacherGroup, TeacherGroupSetup
from rlframe.models import adapters
from rlframe.models.checkpoint import CheckpointReader, copy_sidecars, write_checkpoint
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.rewards.judge import Judge
from rlframe.rollout.config import EngineDtype
from rlframe.rollout.group import RolloutGroup
from rlframe.rollout.worker import RolloutSetup
from rlframe.types.batch import Sequences
from rlframe.utils.registry import find
from rlframe.weight_sync.channel import WeightSync

GIGABYTE = 1e9


def run(config: RunConfig) -> None:
    """Do the whole run, or the rest of it when its folder holds a checkpoint, and print the closing paragraph."""
    started = time.monotonic()
    component, _ = find("rlframe.algorithms", config.algorithm.name, key="algorithm.name")
    algorithm: Algorithm = component(config.algorithm)
    with ExitStack() as stack:
        builder = Builder(config, algorithm, stack)
        if algorithm.online:
            assert isinstance(algorithm, OnlineAlgorithm)
            loop = builder.online(algorithm)
        else:
            assert isinstance(algorithm, OfflineAlgorithm)
            loop = builder.offline(algorithm)
        done_steps = builder.resume(loop)
        ready_s = time.monotonic() - started
        loop.run(done_steps)
        if config.checkpoint.export:
            loop.export("model")
        loop.metrics.say(
            closing_paragraph(
                config, loop.results, loop.phase.totals, ready_s=ready_s, total_s=time.monotonic() - started
            )
        )


class Builder:
    """Makes the parts of a loop and puts what must be closed on `stack`."""

    def __init__(self, config: RunConfig, algorithm: Algorithm, stack: ExitStack):
        self.config, self.algorithm, self.stack = config, algorithm, stack
        self.folder = pathlib.Path(config.output).absolute()
        self.parallel = Parallel.parse(config.train.parallel)
        self.device = platform.resolve(config.cluster.device)
        self.num_engines = config.rollout.num_engines if algorithm.online else 0
        require_weights(config.model)
        self.teacher = config.teacher
        if self.teacher:
            require_weights(self.teacher.model)
        self.tokenizer = AutoTokenizer.from_pretrained(resolve(config.model))
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint)
        latest = self.checkpoints.latest()
        self.state = read_state(latest) if latest else None
        self.latest = latest

    def online(self, algorithm: OnlineAlgorithm) -> OnlineLoop:
        """Every part of the online loop, started and calibrated."""
        config = self.config
        prompts = PromptStream(config.data, tokenizer=self.tokenizer, seed=config.seed)
        judge = self.stack.enter_context(Judge(config.reward))
        choose_sampler = self._sampler(algorithm, prompts)
        placement = self._devices()
        policy = self._policy(placement)
        rollout = self._rollout(placement)
        teacher = self._teacher(placement, policy)
        policy.start()
        rollout.start()
        weight_sync = WeightSync(policy, rollout, config.weight_sync)
        weight_sync.connect()
        # Weights to start from are published as version 0 after those that prove the recordings.
        starts_elsewhere = config.checkpoint.start_from is not None and self.latest is None
        weight_sync.calibrate(version=-1 if starts_elsewhere else 0)
        rollout.rejoin, rollout.restore = weight_sync.rejoin, weight_sync.restore
        metrics = self._metrics()
        # The engines make room for training on a shared GPU; the policy stays where it is, unless asked to sleep too.
        sharing: list[Sleeper] = [rollout] if self.device.type == "cuda" and config.cluster.colocate else []
        if config.train.offload_optimizer:
            sharing.append(policy)
        phase = Phases(sharing=sharing, announce=metrics.announce)
        sampler = choose_sampler(
            prompts=prompts,
            rollout=rollout,
            judge=judge,
            phase=phase,
            prompts_per_step=config.prompts_per_step,
            group_size=algorithm.group_size,
        )
        return OnlineLoop(
            config=config,
            algorithm=algorithm,
            prompts=prompts,
            rollout=rollout,
            judge=judge,
            sampler=sampler,
            policy=policy,
            weight_sync=weight_sync,
            phase=phase,
            metrics=metrics,
            checkpoints=self.checkpoints,
            export=partial(self.export, policy),
            teacher_logprobs=teacher,
            probe=self._probe(prompts, rollout) if config.weight_sync.probe_every_steps else None,
        )

    def offline(self, algorithm: OfflineAlgorithm) -> OfflineLoop:
        """Every part of the offline loop, started."""
        config = self.config
        examples = find_stream(algorithm.data)(
            config.data,
            tokenizer=self.tokenizer,
            seed=config.seed,
            max_tokens=config.train.sequence_tokens,
        )
        policy = self._policy(self._devices())
        policy.start()
        metrics = self._metrics()
        return OfflineLoop(
            config=config,
            algorithm=algorithm,
            examples=examples,
            policy=policy,
            phase=Phases(sharing=[], announce=metrics.announce),
            metrics=metrics,
            checkpoints=self.checkpoints,
            export=partial(self.export, policy),
        )

    def resume(self, loop: OnlineLoop | OfflineLoop) -> int:
        """Put the loop where the latest complete checkpoint left off; returns the steps done."""
        self._start_from(loop)
        if self.state is None or self.latest is None:
            return 0
        if self.config.checkpoint.verify:
            loop.policy.verify(self.latest / TRAINING)
        stream = loop.prompts if isinstance(loop, OnlineLoop) else loop.examples
        stream.restore(self.state.data)
        loop.results |= self.state.results
        loop.policy.load(self.latest / TRAINING, num_optimizer_steps=self.state.num_optimizer_steps)
        if isinstance(loop, OnlineLoop):
            loop.weight_sync.publish(version=self.state.step)
        loop.metrics.say(f"resumed after step {self.state.step} from {self.latest}")
        return self.state.step

    def _start_from(self, loop: OnlineLoop | OfflineLoop) -> None:
        """Begin with the weights of another checkpoint, if the run is told to. A resumed run needs them for its
        reference only."""
        config = self.config.checkpoint
        if config.start_from is None or (self.latest and not self.algorithm.needs_reference):
            return
        folder = pathlib.Path(config.start_from).expanduser()
        # Only what rlframe wrote has checksums.
        if config.verify and (folder / MANIFEST).exists():
            loop.policy.verify(folder)
        loop.policy.load_weights(folder)
        if isinstance(loop, OnlineLoop) and self.latest is None:
            loop.weight_sync.publish(version=0)
        loop.metrics.say(f"weights from {folder}")

    def export(self, policy: PolicyGroup, name: str) -> None:
        """Write the model in Hugging Face format to the run's folder `name`; where adapters are trained, write them in
        PEFT's format to `adapter` beside `model`, and beside any other to `<name>-adapter`."""
        config = self.config.checkpoint
        dtype = getattr(torch, config.export_dtype)
        with whole_folder(self.folder / name) as folder:
            write_checkpoint(folder, policy.export(dtype), max_shard_bytes=int(config.export_shard_gb * GIGABYTE))
            copy_sidecars(resolve(self.config.model), folder, dtype=dtype)
        if self.config.train.lora:
            with whole_folder(self.folder / (f"{name}-adapter" if name != "model" else "adapter")) as folder:
                self.export_adapter(policy, folder)

    def export_adapter(self, policy: PolicyGroup, folder: pathlib.Path) -> None:
        """Write the adapters in PEFT's format to `folder`."""
        lora, source = self.config.train.lora, resolve(self.config.model)
        assert lora is not None
        family = load_family(source)
        adapters.write(
            folder,
            policy.export_adapter(getattr(torch, self.config.checkpoint.export_dtype)),
            base=self.config.model.path,
            model_tensors=family.tensors(family.architecture(read_config(source))),
            rank=lora.rank,
            alpha=lora.alpha,
            rslora=lora.rslora,
            dropout=lora.dropout,
        )

    def _devices(self) -> Placement:
        cluster = self.config.cluster
        layout = self.teacher.own_layout if self.teacher else None
        shape = {
            "num_ranks": self.parallel.world,
            "num_engines": self.num_engines,
            "devices_per_engine": self.config.rollout.devices_per_engine,
            "num_teacher_ranks": layout.world if layout else 0,
            "colocate": cluster.colocate,
        }
        self.stack.enter_context(runtime.running(cluster, num_devices=count_devices(**shape)))
        placement = reserve(**shape, gpu=self.device.type == "cuda", timeout_s=cluster.start_timeout_s)
        self.stack.callback(placement.release)
        return placement

    def _policy(self, placement: Placement) -> PolicyGroup:
        config = self.config
        setup = PolicySetup(
            model=config.model,
            train=config.train,
            device=Device(self.device.type),
            seed=config.seed,
            temperature=config.rollout.temperature if self.algorithm.online else 1.0,
            total_optimizer_steps=config.steps * config.train.minibatches * config.train.epochs,
            with_reference=self.algorithm.needs_reference,
            teacher=self.teacher.model if self.teacher and self.teacher.own_layout is None else None,
        )
        return PolicyGroup(
            setup,
            self.algorithm,
            slots=placement.policy,
            num_threads=self._threads(self.parallel.world),
            **self._limits(),
        )

    def _sampler(self, algorithm: OnlineAlgorithm, prompts: PromptStream) -> Callable[..., Sampler]:
        """What makes the sampler, given its parts. Reads the data's responses where some steps train on them."""
        config = self.config
        if not isinstance(algorithm, Gkd) or algorithm.config.on_policy_fraction == 1:
            return PlainSampler
        examples = responses(
            config.data, prompts, tokenizer=self.tokenizer, seed=config.seed, max_tokens=config.train.sequence_tokens
        )
        return partial(MixedSampler, examples=examples, samples=partial(algorithm.samples, config.seed))

    def _teacher(self, placement: Placement, policy: PolicyGroup) -> Callable[[Sequences], Tensor] | None:
        """What gives the teacher's logprobs of a batch, if the algorithm asks for them."""
        if self.teacher is None or not self.algorithm.needs_teacher_logprobs:
            return None
        layout = self.teacher.own_layout
        if layout is None:
            return policy.teacher_logprobs
        setup = TeacherGroupSetup(
            model=self.teacher.model,
            train=self.config.train,
            layout=layout,
            device=Device(self.device.type),
            temperature=self.config.rollout.temperature,
        )
        group = TeacherGroup(setup, slots=placement.teacher, num_threads=self._threads(layout.world), **self._limits())
        group.start()
        return group.logprobs

    def _rollout(self, placement: Placement) -> RolloutGroup:
        config = self.config
        dtype = config.rollout.dtype
        if dtype is EngineDtype.AUTO:
            dtype = EngineDtype(config.train.dtype.value)
        setup = RolloutSetup(
            rollout=config.rollout,
            model=config.model,
            dtype=dtype,
            device=Device(self.device.type),
            seed=config.seed,
        )
        return RolloutGroup(
            setup,
            tokenizer=self.tokenizer,
            slots=placement.engines,
            num_threads=self._threads(self.num_engines),
            **self._limits(),
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
            "log_folder": str(self.folder / "logs"),
            "start_timeout_s": cluster.start_timeout_s,
            "call_timeout_s": cluster.phase_timeout_s,
        }

    def _threads(self, count: int) -> int:
        """CPU threads of each of `count` processes that work at the same time on this machine."""
        return max(1, len(os.sched_getaffinity(0)) // max(1, count))

    def _metrics(self) -> MetricsLog:
        done_steps = self.state.step if self.state else None
        metrics = MetricsLog(self.config, self.folder, resolved=asdict(self.config), done_steps=done_steps)
        self.stack.callback(metrics.close)
        return metrics


@contextmanager
def whole_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder to write to, which becomes `folder`, in place of one that is there, once all is written."""
    partial_folder = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    yield partial_folder
    shutil.rmtree(folder, ignore_errors=True)
    partial_folder.rename(folder)


def require_weights(model: ModelConfig) -> None:
    """Raises CheckpointError unless the model's files are whole and hold every tensor its config.json calls for."""
    if not model.random_init:
        folder = resolve(model)
        family = load_family(folder)
        CheckpointReader(folder).require(family.tensors(family.architecture(read_config(folder))))
