"""Rules between the teacher, the algorithm, the model and the devices. See `check.py`."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

from rlframe.algorithms.base import Algorithm
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
    ours, theirs = vocabulary(policy_folder), vocabulary(teacher_folder)
    if digest(ours) != digest(theirs):
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        token = differing[0]
        yield (
            f"teacher.path must name a model with the tokenizer of model.path={model.path}, got {teacher_model.path}: "
            f"{len(differing)} tokens differ, such as {token!r}, which is {ours.get(token, 'missing')} here and "
            f"{theirs.get(token, 'missing')} there"
        )


@cache
def vocabulary(folder: Path) -> dict[str, int]:
    """Id of each token of the tokenizer in `folder`, added tokens too."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and most runs have no teacher

    return AutoTokenizer.from_pretrained(folder).get_vocab()


def digest(tokens: dict[str, int]) -> str:
    """A hash of the whole vocabulary, whatever order the tokenizer lists it in."""
    return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()
