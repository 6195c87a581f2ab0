"""Rules across the teacher, the algorithm, the model and the devices. See the package."""

import importlib.util
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from rlframe.algorithms.base import Algorithm
from rlframe.environments.base import answers
from rlframe.megatron.config.parallel import Parallel
from rlframe.models import hub, shards
from rlframe.models.config import ModelConfig
from rlframe.models.families.base import Architecture
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.config import RolloutConfig
from rlframe.run.check import sharing
from rlframe.run.check.context import longest_rollout
from rlframe.run.check.model import file_faults
from rlframe.run.check.roles import vocabulary
from rlframe.run.check.train import gather_faults
from rlframe.run.config import RunConfig
from rlframe.run.recording import SAMPLING
from rlframe.run.teacher import TeacherConfig, TeacherPlacement
from rlframe.types.results import Output
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault

ENGINES_WITH_EXTRA = ("vllm", "sglang")
"""Engines that are separate packages, installed by the extra of the same name."""
OF_ROLLOUT = (*SAMPLING, "oversample", "oversample_rest", "record", "replay")
"""Settings of RolloutConfig that decide how responses are sampled, and what becomes of them."""

OF_POLICY = {
    "cache_after_sync": "a teacher's weights do not change",
    "logprobs": "it is about the policy's engines and the trainer",
}
"""Settings of engines that do nothing for a teacher, and why."""


def faults(run: RunConfig, algorithm: Algorithm) -> Iterator[Fault]:
    """Yields a fault for every reason why the teacher cannot be used, or would have no effect."""
    name = run.algorithm.name
    if run.teacher is None:
        if algorithm.needs_teacher:
            coefficient = algorithm.requirements.teacher_coefficient
            why = f" with algorithm.distillation_coefficient={coefficient}" if coefficient else ""
            yield Fault(
                "teacher.path", f"must name a model: algorithm.name={name}{why} learns from a teacher", got="nothing"
            )
        return
    if not algorithm.needs_teacher:
        has_coefficient = algorithm.requirements.teacher_coefficient is not None
        hint = "raise algorithm.distillation_coefficient above 0, or remove it" if has_coefficient else "remove it"
        yield Fault("teacher.path", f"has no effect with algorithm.name={name}", got=run.teacher.path, hint=hint)
        return
    yield from _placement_faults(run, run.teacher, algorithm)
    yield from _engine_faults(run, run.teacher, writes=algorithm.requirements.teacher_writes)
    try:
        teacher = hub.resolve(run.teacher.model, key="teacher.path")
        architecture = hub.load_family(teacher, key="teacher.path").architecture(hub.read_config(teacher))
        policy = hub.resolve(run.model)
        theirs = hub.load_family(policy).architecture(hub.read_config(policy))
    except ConfigError as error:
        yield from error.faults
        return
    except CheckpointError as error:
        yield Fault("teacher.path", said=error)
        return
    yield from _layout_faults(run, architecture)
    if run.train.share_prompts and run.teacher.placement is not TeacherPlacement.ENGINE:
        yield from sharing.architecture_faults(architecture, model="teacher.path")
    yield from _capacity_faults(run, algorithm, architecture)
    yield from file_faults(run.teacher.model, architecture, num_outputs=None, key="teacher.path")
    whole = algorithm.output is Output.DIVERGENCE
    try:
        yield from _vocabulary_faults(run.model, policy, theirs, run.teacher.model, teacher, architecture, whole=whole)
    except CheckpointError as error:
        yield Fault("teacher.path", said=error)


def _placement_faults(run: RunConfig, teacher: TeacherConfig, algorithm: Algorithm) -> Iterator[Fault]:
    """Checks that the teacher can compute what the algorithm needs, at its placement."""
    name, placement, divergence = run.algorithm.name, teacher.placement, algorithm.divergence
    if divergence and not divergence.top_k and placement is not TeacherPlacement.WORKERS:
        yield Fault(
            "teacher.placement",
            f"must be workers with algorithm.name={name} and algorithm.top_k=0",
            got=placement,
            why="its divergence is over the whole vocabulary, which only the policy's ranks can compute",
            hint="set algorithm.top_k, or learn from sampled tokens with algorithm.name=on_policy_distillation",
        )
    if placement is not TeacherPlacement.ENGINE:
        return
    assert teacher.engine is not None
    key, temperature = "rollout.temperature", run.rollout.temperature
    if divergence:
        key, temperature = "algorithm.temperature", divergence.temperature
    if temperature != 1:
        yield Fault(
            key,
            "must be 1 with teacher.placement=engine",
            got=temperature,
            why="engines give the logprobs of given tokens at temperature 1 only",
            hint="placement=own can divide its logits",
        )


def _engine_faults(run: RunConfig, teacher: TeacherConfig, *, writes: bool) -> Iterator[Fault]:
    """Checks that the teacher has engines if it needs some, and that all their settings have an effect."""
    engine = teacher.engine
    if engine is None:
        if writes:
            yield Fault(
                "teacher.engine",
                "must name an engine with algorithm.seq_kd=true, such as teacher.engine.name=vllm",
                got="nothing",
                why="the teacher writes responses in it",
            )
        return
    if not writes and teacher.placement is not TeacherPlacement.ENGINE:
        yield Fault(
            "teacher.engine",
            f"has no effect with teacher.placement={teacher.placement} unless the teacher writes "
            "responses (algorithm.seq_kd)",
            got=engine.name,
            hint="remove it or set placement=engine",
        )
    yield from plain_faults(engine, "teacher.engine")
    if engine.name in ENGINES_WITH_EXTRA and importlib.util.find_spec(engine.name) is None:
        yield Fault(
            "teacher.engine.name",
            f"needs the package {engine.name}",
            got=engine.name,
            why=f'pip install "rlframe[{engine.name}]"',
            stated=True,
        )
    defaults = {field.name: field.default for field in fields(engine)}
    for name in OF_ROLLOUT:
        value = getattr(engine, name)
        if value != (defaults[name] if defaults[name] is not MISSING else []):
            yield Fault(
                f"teacher.engine.{name}",
                "has no effect",
                got=value,
                why=f"the setting rollout.{name} also applies to the teacher's responses",
                hint="remove it",
            )
    for name, why in OF_POLICY.items():
        if (value := getattr(engine, name)) != defaults[name]:
            yield Fault(f"teacher.engine.{name}", "has no effect", got=value, why=why, hint="remove it")
    if not writes and engine.max_restarts != defaults["max_restarts"]:
        yield Fault(
            "teacher.engine.max_restarts",
            "has no effect unless the teacher writes responses (algorithm.seq_kd)",
            got=engine.max_restarts,
            why="an engine that dies while it scores ends the run",
            hint="remove it",
        )


def _capacity_faults(run: RunConfig, algorithm: Algorithm, teacher: Architecture) -> Iterator[Fault]:
    """Checks that algorithm.top_k is below the teacher's vocabulary, and that its engine can hold it and the longest
    rollout."""
    assert run.teacher is not None
    if algorithm.divergence and algorithm.divergence.top_k >= teacher.vocab_size:
        yield Fault(
            "algorithm.top_k",
            f"must be below the {teacher.vocab_size} logits of teacher.path={run.teacher.path}",
            got=algorithm.divergence.top_k,
            hint="0 compares the whole vocabulary",
        )
    engine = run.teacher.engine
    if engine is None:
        return
    yield from (fault.moved({"rollout": "teacher.engine"}) for fault in engine.faults(teacher))
    if not algorithm.online:
        return
    judges = run.teacher.placement is TeacherPlacement.ENGINE
    # To score a sequence an engine may have to sample one token after it.
    limit = (engine.sequence_tokens or teacher.max_positions) - judges
    what, longest = longest_rollout(run)
    if longest > limit:
        key = "the teacher's positions" if engine.sequence_tokens is None else "teacher.engine.max_model_len"
        at_most = f"must be at most {limit} ({key}{' less 1' if judges else ''})"
        if answers(run.environment):
            yield Fault("environment.max_tokens", at_most, got=longest, why=f"by {what}")
            return
        yield Fault(
            "data.max_prompt_tokens",
            f"+ rollout.max_tokens={run.rollout.max_tokens} {at_most}, got {longest} tokens",
            got=run.data.max_prompt_tokens,
            hint="lower one of the two",
            stated=True,
        )


def _layout_faults(run: RunConfig, architecture: Architecture) -> Iterator[Fault]:
    """Checks that the layout divides the teacher."""
    assert run.teacher is not None
    if run.teacher.placement is TeacherPlacement.ENGINE:
        return
    layout = run.teacher.own_layout
    key, parallel = ("teacher.parallel", layout) if layout else ("train.parallel", Parallel.parse(run.train.parallel))
    if layout is None and parallel.pp > 1:
        yield Fault(
            "train.parallel",
            "has pipeline stages, which teacher.placement=workers does not support",
            got=run.train.parallel,
            why="the teacher's logits must be on the rank and at the time of the policy's, which only "
            "the last stage has",
            hint="use tensor, context or expert parallelism",
            stated=True,
        )
        return
    axes = asdict(parallel)
    if layout is None and not architecture.num_experts:
        # A dense teacher has no part on ranks that only hold experts of the policy.
        axes |= {"ep": 1, "etp": 1}
    for fault in shards.faults(architecture, **axes, **asdict(run.train.context_parallel)):
        yield fault.moved({"train.parallel": key}).noted(f"(of the teacher {run.teacher.path})")
    if layout and architecture.num_experts:
        yield from gather_faults(run.train.moe.dispatcher, layout, key=key)


def _vocabulary_faults(
    model: ModelConfig,
    policy_folder: Path,
    policy: Architecture,
    teacher_model: ModelConfig,
    teacher_folder: Path,
    teacher: Architecture,
    *,
    whole: bool,
) -> Iterator[Fault]:
    """Checks that both models have the same tokens.

    Args:
        whole: whether the two distributions are compared row by row, so that padding rows count too.
    """
    if whole and teacher.vocab_size != policy.vocab_size:
        yield Fault(
            "teacher.path",
            f"must name a model with the policy's {policy.vocab_size} logits",
            got=f"{teacher_model.path} with {teacher.vocab_size}",
            why="distributions over different tokens cannot be compared",
        )
    yield from vocabulary.faults(model, policy_folder, teacher_model, teacher_folder, key="teacher.path")


def plain_faults(engine: RolloutConfig, key: str) -> Iterator[Fault]:
    """Checks that engines of another model than the policy hold it as it is.

    Args:
        key: section of their settings.
    """
    if engine.engine_format is not EngineFormat.NONE:
        why = "rlframe has proved the policy's engines in FP8 alone, so far"
        yield Fault(f"{key}.quantization", "must be none", got=engine.engine_format, why=why)
