"""Composes the offline loop: a policy that trains on given sequences."""

from rlframe.algorithms.base import OfflineAlgorithm
from rlframe.data.cursor import tell_of_repeats
from rlframe.data.kinds import find_source
from rlframe.loops.offline import OfflineLoop
from rlframe.loops.reference import PrecomputedReference
from rlframe.loops.saving.exporting import Exporter
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.run.compose import models
from rlframe.run.compose.parts import Parts
from rlframe.run.compose.throughput import throughput


def offline(parts: Parts, algorithm: OfflineAlgorithm) -> OfflineLoop:
    """Returns the offline loop with every part started."""
    config, required = parts.config, parts.requirements
    assert required.data is not None
    folder = resolve(config.model)
    # Before Ray: what is wrong with the data is said at once, and processes that tokenise it inherit no threads of Ray.
    examples = find_source(required.data)(
        config.data,
        tokenizer=parts.tokenizer,
        seed=config.seed,
        max_tokens=config.train.sequence_tokens,
        max_positions=load_family(folder).architecture(read_config(folder)).max_positions,
    )
    tell_of_repeats(examples, config.data, prompts_per_step=config.prompts_per_step)
    parts.start_up.done("data")
    placement = parts.devices()
    policy = models.policy(parts, placement, algorithm)
    engines = models.teacher_engines(parts, placement)
    teacher = models.teacher(parts, placement, algorithm, policy, engines)
    if engines:
        engines.start()
    parts.start_groups()
    parts.start_up.done("processes")
    metrics = parts.metrics()
    model = PrecomputedReference(policy, parts.folder / "reference") if required.precomputed_reference else policy
    return OfflineLoop(
        schedule=parts.schedule(),
        algorithm=algorithm,
        examples=examples,
        prompts_per_step=config.prompts_per_step,
        policy=policy,
        model=model,
        teacher=teacher,
        phase=parts.phases(metrics, []),
        metrics=metrics,
        checkpoints=parts.checkpoints,
        throughput=throughput(parts, algorithm),
        export=Exporter(config.checkpoint, parts.folder, policy, chat_template=parts.chat_template()),
    )
