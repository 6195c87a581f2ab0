"""Composes recordings: what writes one, and the loop that trains on one."""

from pathlib import Path

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.attempts.recording import begin_recording, read_recording
from rlframe.loops.phases import Phases
from rlframe.loops.recording import RecordingSampler, ReplaySampler
from rlframe.loops.replay import ReplayLoop
from rlframe.loops.sampling import Sampler
from rlframe.loops.saving.manifest import read_owner
from rlframe.run.compose.parts import Parts
from rlframe.run.compose.trained import Trained
from rlframe.run.recording import recording_of


def recorded(parts: Parts, sampler: Sampler) -> RecordingSampler:
    """Returns a sampler whose groups are recorded in the run's folder."""
    run = read_owner(parts.folder).run
    begin_recording(parts.folder, recording_of(parts.config, run=run, tokenizer=parts.tokenizer))
    return RecordingSampler.of(sampler, parts.folder)


def replay(parts: Parts, algorithm: OnlineAlgorithm) -> ReplayLoop:
    """Returns the loop that trains on the groups of `rollout.replay`, its models started."""
    assert parts.config.rollout.replay is not None
    output = Path(parts.config.rollout.replay).expanduser()
    recording = read_recording(output)
    half = Trained(parts, parts.devices(), algorithm)
    half.start()
    metrics = parts.metrics()
    phase = Phases(sharing=half.sleepers(), announce=metrics.announce)
    return ReplayLoop(
        schedule=parts.schedule(),
        algorithm=algorithm,
        sampler=ReplaySampler(output=output, recording=recording, phase=phase),
        policy=half.policy,
        critic=half.critic,
        teacher=half.teacher,
        phase=phase,
        metrics=metrics,
        checkpoints=parts.checkpoints,
        export=half.exporter(),
    )
