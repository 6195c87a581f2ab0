"""Composes recordings: what writes one, and the loop that trains on one."""

from pathlib import Path

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.attempts.account.recording import begin_recording, read_recording
from rlframe.loops.phases import Phases
from rlframe.loops.replay import ReplayLoop
from rlframe.loops.sampling.recorded import RecordingSampler, ReplaySampler
from rlframe.loops.sampling.source import GroupSource
from rlframe.loops.saving.manifest import read_owner
from rlframe.run.compose.parts import Parts
from rlframe.run.compose.sampling import minibatches_of
from rlframe.run.compose.throughput import throughput
from rlframe.run.compose.trained import trained
from rlframe.run.recording import recording_of


def recorded(parts: Parts, sampler: GroupSource, phase: Phases) -> RecordingSampler:
    """Returns a sampler whose groups are recorded in the run's folder."""
    run = read_owner(parts.folder).run
    begin_recording(parts.folder, recording_of(parts.config, run=run, tokenizer=parts.tokenizer))
    return RecordingSampler(sampler=sampler, output=parts.folder, phase=phase)


def replay(parts: Parts, algorithm: OnlineAlgorithm) -> ReplayLoop:
    """Returns the loop that trains on the groups of `rollout.replay`, its models started."""
    assert parts.config.rollout.replay is not None
    output = Path(parts.config.rollout.replay).expanduser()
    recording = read_recording(output)
    models = trained(parts, parts.devices(), algorithm)
    models.start(parts)
    parts.start_up.done("processes")
    metrics = parts.metrics()
    phase = parts.phases(metrics, models.sleepers(parts))
    return ReplayLoop(
        schedule=parts.schedule(),
        algorithm=algorithm,
        sampler=ReplaySampler(output=output, recording=recording, phase=phase, num_minibatches=minibatches_of(parts)),
        policy=models.policy,
        critic=models.critic,
        teacher=models.teacher,
        phase=phase,
        metrics=metrics,
        checkpoints=parts.checkpoints,
        throughput=throughput(parts, algorithm, critic=algorithm.critic),
        export=models.exporter(parts),
    )
