"""Rules between the teacher, the algorithm, the model and the devices. See `check.py`."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rlframe.algorithms.base import Algorithm
from rlframe.config import vocabulary
from rlframe.loops.run import RunConfig
from rlframe.megatron.layout import Parallel
from rlframe.megatron.teacher_config import TeacherPlacement
from rlframe.models import hub, shards
from rlframe.models.config import ModelConfig
from rlframe.models.families.base import Architecture
from rlframe.types.results import Output
from rlframe.utils.errors import CheckpointError, ConfigError


def faults(run: RunConfig, algorithm: Algorithm) -> Iterator[str]:
    """Why there can be no such teacher, or why it would have no effect."""
    name = run.algorithm.name
    if run.teacher is None:
        if algorithm.needs_teacher:
            yield f"teacher.path must name a model: algorithm.name={name} learns from a teacher, got nothing"
        return
    if not algorithm.needs_teacher:
        has_coefficient = hasattr(run.algorithm, "distillation_coefficient")
        what = "; raise algorithm.distillation_coefficient above 0, or remove it" if has_coefficient else "; remove it"
        yield f"teacher.path has no effect with algorithm.name={name}, got {run.teacher.path}{what}"
        return
    whole = algorithm.output is Output.DIVERGENCE
    if whole and run.teacher.placement is TeacherPlacement.OWN:
        yield (
            f"teacher.placement must be workers with algorithm.name={name}, got own: its divergence is over the whole "
            "vocabulary, and a group of its own sends logprobs of sampled tokens only; on_policy_distillation learns "
            "from those"
        )
    try:
        teacher = hub.resolve(run.teacher.model, key="teacher.path")
        architecture = hub.load_family(teacher, key="teacher.path").architecture(hub.read_config(teacher))
        policy = hub.resolve(run.model)
        theirs = hub.load_family(policy).architecture(hub.read_config(policy))
    except ConfigError as error:
        yield from error.faults
        return
    except CheckpointError as error:
        yield str(error)
        return
    yield from _layout_faults(run, architecture)
    yield from _vocabulary_faults(run.model, policy, theirs, run.teacher.model, teacher, architecture, whole=whole)


def _layout_faults(run: RunConfig, architecture: Architecture) -> Iterator[str]:
    """The layout divides the teacher."""
    assert run.teacher is not None
    layout = run.teacher.own_layout
    key, parallel = ("teacher.parallel", layout) if layout else ("train.parallel", Parallel.parse(run.train.parallel))
    if layout is None and parallel.pp > 1:
        yield (
            f"train.parallel={run.train.parallel} has pipeline stages, with which teacher.placement=workers cannot "
            "work: the teacher's logits must be on the rank and at the time of the policy's, which only the last stage "
            "has; use tensor, context or expert parallelism"
        )
        return
    axes = asdict(parallel)
    if layout is None and not architecture.num_experts:
        # A dense teacher has nothing for the ranks that share out the policy's experts.
        axes |= {"ep": 1, "etp": 1}
    for fault in shards.faults(architecture, **axes):
        yield f"{fault.replace('train.parallel', key)} (of the teacher {run.teacher.path})"


def _vocabulary_faults(
    model: ModelConfig,
    policy_folder: Path,
    policy: Architecture,
    teacher_model: ModelConfig,
    teacher_folder: Path,
    teacher: Architecture,
    *,
    whole: bool,
) -> Iterator[str]:
    """Both models read and write the same tokens.

    Args:
        whole: the two distributions are compared row by row, so that padding rows count too.
    """
    if whole and teacher.vocab_size != policy.vocab_size:
        yield (
            f"teacher.path must name a model with the policy's {policy.vocab_size} logits, got {teacher_model.path} "
            f"with {teacher.vocab_size}: one distribution cannot be compared with another over other tokens"
        )
    yield from vocabulary.faults(model, policy_folder, teacher_model, teacher_folder, key="teacher.path")
