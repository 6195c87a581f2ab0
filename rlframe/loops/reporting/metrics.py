"""The files of a run's numbers, metrics.jsonl and samples.jsonl, its trackers and the progress bar."""

import json
import logging
import math
import pathlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from jaxtyping import Int
from tqdm import tqdm

from rlframe.loops.alerts.config import AlertsConfig
from rlframe.loops.alerts.watch import Alerts
from rlframe.loops.callbacks import Callbacks
from rlframe.loops.config import LoggingConfig
from rlframe.loops.reporting.samples import Chosen, SampleFiles, choose, in_digits
from rlframe.loops.reporting.timeline import Timeline
from rlframe.loops.reporting.trackers.base import EVALUATED, Tracker
from rlframe.loops.reporting.warned import Warned
from rlframe.ops.statistics.responses import quantiles, repeated_fraction
from rlframe.types.batch import TrainBatch
from rlframe.types.rollout import FinishReason, Group, Rollout, attempts_in, members, reward_of, rewards_of
from rlframe.utils.files.jsonl import append, keep_steps
from rlframe.utils.text import printable

logger = logging.getLogger(__name__)
RESTARTS = "cluster/restarts"
REFRESH_S = 0.5
"""Least seconds between two updates of the progress bar."""


class MetricsLog:
    """Writes one line per step to every place that the config names. Keys are `area/name_unit`."""

    def __init__(
        self,
        config: LoggingConfig,
        folder: pathlib.Path,
        *,
        name: str,
        steps: int,
        done_steps: int | None,
        trackers: Sequence[Tracker] = (),
        decode: Callable[[Sequence[int]], list[str]] = in_digits,
        callbacks: Callbacks | None = None,
        alerts: AlertsConfig | None = None,
    ):
        """
        Args:
            folder: of the run.
            name: of the run.
            steps: of the whole run.
            done_steps: steps a resumed run keeps, None for a new one; what was written after them is cut off, it will
                be made again.
            trackers: begun, and closed by who has begun them.
            decode: returns the text of each of some tokens.
            callbacks: of the caller of the run.
            alerts: their settings. None means no alerts.
        """
        self.config = config
        self._metrics = folder / "metrics.jsonl"
        self._samples = folder / "samples.jsonl"
        self.timeline = Timeline(folder)
        """The phases of the steps."""
        self._sample_files = SampleFiles(folder, decode)
        self.alerts = Alerts(alerts, self.print_line) if alerts else None
        self._known = self._keep(done_steps)
        self._trackers = trackers
        self.callbacks = callbacks or Callbacks()
        self._bar = tqdm(
            total=steps, initial=done_steps or 0, desc=name, unit="step", disable=not config.progress,
            dynamic_ncols=True, mininterval=REFRESH_S,
        )  # fmt: skip
        self._shown: dict[str, str] = {}
        self._drawn = 0.0
        self._measured: dict[str, tuple[int, float]] = {}
        self._step = (done_steps or 0) + 1
        """The step under way. The bar does not count if it is not shown."""
        self._warned = Warned(folder, step=lambda: self._step, anew=done_steps is None)
        self.marks: dict[str, float] = {}
        """Metrics of the step under way that others than the loop add."""
        self.num_restarts = 0
        """Number of restarts of trainer ranks so far, written with the metrics of every step."""

    def _keep(self, done_steps: int | None) -> set[str]:
        """Truncates the files to `done_steps` steps. Returns the names of the metrics that are left."""
        last = -1 if done_steps is None else done_steps
        keep_steps(self._samples, last)
        self.timeline.rewind(last)
        self._sample_files.rewind(done_steps)
        known = keep_steps(self._metrics, last)
        if self.alerts:
            self.alerts.rewind(self._metrics)
        return known

    def rewind(self, done_steps: int | None) -> None:
        """Resets the files to the state after `done_steps` steps, or to the beginning if None, as a resumed run would
        find it."""
        self._known = self._keep(done_steps)
        self._measured.clear()
        self._bar.n = done_steps or 0
        self._step = self._bar.n + 1
        self._bar.refresh()
        for tracker in self._trackers:
            tracker.rewind(done_steps)

    def announce(self, phase: str) -> None:
        """Shows the phase in the progress bar, unless the bar was drawn a moment ago."""
        due = time.monotonic() - self._drawn > REFRESH_S
        self._bar.set_postfix({"phase": phase, **self._shown}, refresh=due)
        if due:
            self._drawn = time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step's metrics everywhere and moves the progress bar."""
        line = {**metrics, **self.marks, RESTARTS: float(self.num_restarts)}
        self._write(step, line)
        labels = {
            "reward": "reward/mean",
            "loss": "train/loss",
            "kl": "train/kl_nats",
            "tok/s": "throughput/tokens_per_s",
        }
        self._shown = {label: f"{metrics[key]:.4g}" for label, key in labels.items() if key in metrics}
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update()
        if self.alerts:
            self.alerts.look(step, line)
        self._step = step + 1
        self.callbacks.on_step(step, line)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of an evaluation, or of a probe. The progress bar does not move."""
        self._write(step, metrics)
        if any(name.startswith("evaluation/") for name in metrics):
            self.callbacks.on_evaluation(step, metrics)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        append(self._metrics, {"step": step, **metrics})
        # An evaluation beside training ends inside a phase of a later step, whose line has both.
        if EVALUATED not in metrics or self._step > self._bar.total:
            self.timeline.write(step)
        self._warned.gather()
        self._measured |= {name: (step, value) for name, value in metrics.items()}
        self._known |= set(metrics)
        for tracker in self._trackers:
            tracker(step, metrics)

    def has_evaluation(self, step: int) -> bool:
        """Returns whether the numbers of an evaluation of step `step` are written."""
        records = map(json.loads, self._metrics.read_bytes().splitlines()) if self._metrics.exists() else ()
        return any(record["step"] == step and any(map(is_evaluated, record)) for record in records)

    def measured(self, step: int) -> tuple[dict[str, float], set[str]]:
        """Returns the metrics of a step, and the names of all metrics that the run has logged."""
        return {name: value for name, (at, value) in self._measured.items() if at == step}, self._known

    def choose_samples(
        self, step: int, rollouts: Sequence[Rollout], batch: TrainBatch | None = None, *, evaluation: str = ""
    ) -> Chosen:
        """Returns the rollouts of a step that are kept.

        Args:
            batch: what the step trains on, in the order of the rollouts. None if it trains on nothing.
            evaluation: name of the set of prompts of an evaluation.
        """
        return choose(self.config.samples, step, rollouts, batch, evaluation=evaluation)

    def log_samples(self, chosen: Chosen) -> None:
        """Writes the first rollouts of a step as text, and those that are kept token by token. The first ones of an
        evaluation are always in the trackers' tables."""
        self._sample_files.write(chosen)
        records = []
        everything = ((each, sequences) for sequences in attempts_in(chosen.rollouts) for each in sequences)
        for rollout, sequences in islice(everything, self.config.samples_per_step):
            record = {
                "step": chosen.step,
                "id": rollout.prompt.id,
                "prompt": rollout.prompt.text,
                "response": rollout.text,
                **({"messages": rollout.messages} if rollout.messages else {}),
                "answer": rollout.prompt.answer,
                "reward": reward_of(sequences),
                "reward_parts": rollout.reward_parts,
                "finish_reason": rollout.finish_reason,
                "versions": [span.version for span in rollout.spans],
            }
            records.append(record)
        if records:
            append(self._samples, *records)
        every = self.config.sample_table_every_steps
        if records and every and (chosen.evaluation or chosen.step % every == 0):
            for tracker in self._trackers:
                tracker.samples(chosen.step, records)

    def print_line(self, text: str) -> None:
        """Shows a line of text above the progress bar."""
        self._bar.clear()
        tqdm.write(printable(text))
        if text.startswith("warning: "):
            self._warned.note(text.removeprefix("warning: "))

    def close(self, error: BaseException | None = None) -> None:
        """Ends the progress bar, the notes of warnings and the files of samples.

        Args:
            error: what ended the run. None means that it has ended well.
        """
        self._bar.close()
        if error:
            self._warned.note_failure(error)
        self._warned.close()
        self._sample_files.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The tokens of some sequences, as numbers of a step are made of them."""

    lengths: Int[np.ndarray, " R"]
    """[R] number of tokens of each sequence."""
    sampled: Int[np.ndarray, " R"]
    """[R] number of those that the policy sampled."""
    ids: Int[np.ndarray, " N"]
    """[N] the sampled tokens of all sequences, end to end."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "Tokens":
        """Returns the tokens of rollouts."""
        masks = [rollout.loss_mask for rollout in rollouts]
        lengths = np.fromiter(map(len, masks), np.int64, len(masks))
        mask = np.concatenate(masks)
        sampled = np.add.reduceat(mask, np.cumsum(lengths) - lengths, dtype=np.int64)
        ids = np.concatenate([rollout.input.token_ids for rollout in rollouts])[mask]
        return cls(lengths=lengths, sampled=sampled, ids=ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The numbers of a step's rollouts."""

    metrics: dict[str, float]
    """See `rollout_metrics`."""
    tokens: Tokens
    predicted: int
    """Number of tokens that the loss counts: without those that were sampled and are masked."""

    @classmethod
    def of(cls, groups: Sequence[Group], batch: TrainBatch) -> "Seen":
        """Returns the numbers of rollouts, and of the batch that was made of them."""
        tokens = Tokens.of(members(groups))
        metrics = rollout_metrics(groups, tokens)
        return cls(metrics=metrics, tokens=tokens, predicted=int(batch.loss_mask.sum()))


def rollout_metrics(groups: Sequence[Group], tokens: Tokens | None = None) -> dict[str, float]:
    """Returns metrics of the rollouts of a step: rewards of attempts, lengths and repetition of sequences, how they
    ended, how many groups have a signal.

    `rollout/truncated_fraction` is of sequences. With `algorithm.mask_truncated` attempts whose last sequence is cut
    off are excluded from the loss, all sequences of each.

    Args:
        tokens: those of the rollouts, if they are known.
    """
    rollouts = members(groups)
    tokens = Tokens.of(rollouts) if tokens is None else tokens
    attempts_by_group = [attempts_in(group.rollouts) for group in groups]
    attempts = list(chain.from_iterable(attempts_by_group))
    last = [sequences[-1] for sequences in attempts]
    totals = zip(last, rewards_of(attempts), strict=True)
    by_group = [
        [total for each, total in islice(totals, len(own)) if not math.isnan(each.reward)] for own in attempts_by_group
    ]
    rewards = list(chain.from_iterable(by_group))
    mean = mean_of(rewards)
    at_tokens = [float(given.sum()) for rollout in rollouts if (given := rollout.rewards_at_tokens) is not None]
    return {
        "reward/mean": mean,
        "reward/std": mean_of([(reward - mean) ** 2 for reward in rewards]) ** 0.5,
        **{f"reward/{name}_mean": value for name, value in part_means(attempts).items()},
        **({"reward/at_tokens_mean": sum(at_tokens) / len(attempts)} if at_tokens else {}),
        "reward/failed_fraction": sum([each.reward_failed for each in last]) / len(attempts),
        **{f"reward/{name}": value for name, value in trouble_fractions(last).items()},
        "reward/unscored_fraction": 1 - len(rewards) / len(attempts),
        "reward/flat_groups_fraction": sum([len(set(map(np.float32, own))) < 2 for own in by_group]) / len(groups),
        **response_metrics(tokens),
        "rollout/truncated_fraction": [each.finish_reason for each in rollouts].count(FinishReason.LENGTH)
        / len(rollouts),
        "rollout/sampled": float(len(rollouts)),
        "rollout/tokens": float(tokens.lengths.sum()),
        **environment_metrics(attempts),
    }


def trouble_fractions(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the fraction of attempts, by their last rollouts, with each trouble that a part of the reward had."""
    troubles = Counter(pair for each in rollouts if each.reward_troubles for pair in each.reward_troubles.items())
    return {
        f"{name}_{trouble}_fraction": number / len(rollouts) for (name, trouble), number in sorted(troubles.items())
    }


def response_metrics(tokens: Tokens) -> dict[str, float]:
    """Returns the lengths of what was sampled in each sequence, and how much it repeats itself."""
    p50, p90, p99 = quantiles(tokens.sampled, (0.5, 0.9, 0.99))
    repeated = repeated_fraction(tokens.ids, tokens.sampled)
    return {
        "rollout/response_tokens_mean": int(tokens.sampled.sum()) / len(tokens.sampled),
        "rollout/response_tokens_p50": p50,
        "rollout/response_tokens_p90": p90,
        "rollout/response_tokens_p99": p99,
        "rollout/response_tokens_max": float(tokens.sampled.max()),
        **({} if repeated is None else {"rollout/repeated_fraction": repeated}),
    }


def environment_metrics(attempts: Iterable[Sequence[Rollout]]) -> dict[str, float]:
    """Returns the mean of the turns and of each number that environments gave, over the attempts that have it. A number
    of theirs with the name `turns` takes the place of the turns."""
    turns: list[float] = []
    values: dict[str, list[float]] = defaultdict(list)
    for sequences in attempts:
        last = sequences[-1]
        if last.messages:
            turns.append(float(sum(len(each.turns) for each in sequences)))
        if last.numbers:
            for name, value in last.numbers.items():
                values[name].append(value)
    found = {"turns": turns, **values} if turns else values
    return {f"environment/{name}_mean": mean_of(own) for name, own in found.items()}


def scored(attempts: Iterable[Sequence[Rollout]]) -> list[float]:
    """Returns the total rewards of the attempts that some reward function scored."""
    everything = list(attempts)
    pairs = zip(everything, rewards_of(everything), strict=True)
    return [total for sequences, total in pairs if not math.isnan(sequences[-1].reward)]


def part_means(attempts: Iterable[Sequence[Rollout]]) -> dict[str, float]:
    """Returns the mean of each part over the attempts that it scored."""
    return means_by_name([sequences[-1].reward_parts for sequences in attempts])


def means_by_name(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each name over the mappings that have it."""
    names = dict.fromkeys(chain.from_iterable(numbers))
    return {name: mean_of([own[name] for own in numbers if name in own]) for name in names}


def mean_of(values: Sequence[float]) -> float:
    """Returns the mean. NaN of an empty sequence."""
    return sum(values) / len(values) if values else math.nan


def is_evaluated(name: str) -> bool:
    """Returns whether every evaluation of a set of prompts writes this metric, and nothing else does."""
    return name.startswith("evaluation/") and name.endswith("/reward_mean")
