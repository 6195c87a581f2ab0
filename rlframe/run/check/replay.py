"""Rules about replays. See the package."""

import json
from collections.abc import Iterator
from pathlib import Path

from rlframe.attempts.account.recording import ROLLOUTS, Recording, missing_steps, read_recording
from rlframe.models import hub
from rlframe.models.tokenizer import load
from rlframe.run.config import RunConfig
from rlframe.run.recording import recording_of
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault

KEY = "rollout.replay"


def faults(run: RunConfig) -> Iterator[Fault]:
    """Checks that the recording is there, whole in its steps, and was made with this run's settings and tokenizer."""
    if run.rollout.replay is None:
        return
    output = Path(run.rollout.replay).expanduser()
    if output.absolute() == Path(run.output).absolute():
        yield Fault(KEY, "must be the folder of another run", got=run.rollout.replay, hint="set output=ANOTHER")
        return
    if not (output / ROLLOUTS).is_dir():
        yield Fault(KEY, "must be the folder of a run with rollout.record=true", got=f"{output}, without {ROLLOUTS}/")
        return
    try:
        recording = read_recording(output)
        mine = recording_of(run, run=recording.run, tokenizer=load(hub.resolve(run.model)))
    except CheckpointError as error:
        yield Fault(KEY, said=error)
        return
    except ConfigError as error:
        yield from error.faults
        return
    yield from _differences(recording, mine)
    yield from _missing(output, run)
    metric = run.checkpoint.best_metric
    if metric and metric.startswith("evaluation/"):
        yield Fault("checkpoint.best_metric", "is not measured in a replay, which evaluates nothing", got=metric)


def _differences(recording: Recording, mine: Recording) -> Iterator[Fault]:
    for key, value in mine.settings.items():
        if (there := recording.settings.get(key)) != value:
            yield Fault(key, f"must be {json.dumps(there)}, with which {KEY} was recorded", got=json.dumps(value))
    if recording.tokenizer != mine.tokenizer:
        yield Fault(
            "model.path",
            f"must have the tokenizer with which {KEY} was recorded, whose fingerprint is {recording.tokenizer}",
            got=mine.tokenizer,
        )


def _missing(output: Path, run: RunConfig) -> Iterator[Fault]:
    missing = missing_steps(output, run.steps)
    if not missing:
        return
    shown = ", ".join(map(str, missing[:5]))
    hint = "record it again"
    if (whole := missing[0] - 1) and len(missing) == run.steps - whole:
        hint = f"set steps={whole}, and train.optimizer.decay_steps where the learning rate follows the run's length"
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    yield Fault(KEY, f"must hold all of steps={run.steps}", got=f"{output} without step {shown}{more}", hint=hint)
