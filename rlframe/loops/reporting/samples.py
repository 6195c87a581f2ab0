"""Attempts that a run keeps token by token: a compressed file of JSON lines for each step, in `samples/`."""

import gzip
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.loops.config import Keep, SamplesConfig
from rlframe.types.batch import TrainBatch
from rlframe.types.rollout import Rollout, attempts_in, rewards_of
from rlframe.utils.files.whole import writing
from rlframe.utils.text import json_line, printable

SAMPLES = "samples"
NAME = re.compile(r"step-(\d{8,})(?:-evaluation-(.+))?\.jsonl\.gz")
DIGITS = 6
"""Digits after the decimal point of numbers by token."""
LEVEL = 3
"""Level of compression: 6 makes files 5 % smaller and takes twice as long."""


@dataclass(kw_only=True)
class Chosen:
    """Attempts of a step that are kept."""

    step: int
    rollouts: Sequence[Rollout]
    """All rollouts of the step."""
    places: dict[int, list[str]]
    """The choices that keep a rollout, by its place among `rollouts`."""
    batch: TrainBatch | None = None
    """The batch that the step trains on, in the order of `rollouts`. None if it trains on nothing."""
    evaluation: str = ""
    """Name of the set of prompts of an evaluation. Empty for a step of training."""
    trainer_logprobs: dict[int, Float[Tensor, " L"]] = field(default_factory=dict)
    """[L] nats of the trainer, by place."""
    advantages: Float[np.ndarray, " R"] | None = None
    """[R] see `mean_advantages`. None if nothing is kept."""

    def marked(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with a mark at the kept rollouts, so that the training pass returns their logprobs. A batch
        with the logprobs of the policy before the update needs none."""
        if not self.places or batch.old_logprobs is not None:
            return batch
        kept = torch.zeros(batch.num_sequences, dtype=torch.bool)
        kept[list(self.places)] = True
        return replace(batch, kept=kept)

    def take_trainer_logprobs(self, logprobs: Float[Tensor, " T_kept"] | None) -> None:
        """Takes the nats of the rollouts that `marked` has marked, one after the other. None if it marked none."""
        if logprobs is not None:
            lengths = [self.rollouts[place].num_tokens for place in self.places]
            self.trainer_logprobs = dict(zip(self.places, logprobs.split(lengths), strict=True))


def choose(
    config: SamplesConfig,
    step: int,
    rollouts: Sequence[Rollout],
    batch: TrainBatch | None = None,
    *,
    evaluation: str = "",
) -> Chosen:
    """Returns the attempts of a step that the settings keep, whole: with all of their sequences."""
    if not config.keep:
        return Chosen(step=step, rollouts=rollouts, places={}, batch=batch, evaluation=evaluation)
    attempts = attempts_in(rollouts)
    ends = list(accumulate(map(len, attempts)))
    advantages = np.zeros(len(rollouts)) if batch is None else mean_advantages(batch)
    rewards = rewards_of(attempts)
    merits = advantages[np.array(ends, dtype=np.int64) - 1]
    known: dict[int, list[str]] = {}
    for choice in config.keep:
        for index in _indices(choice, config.of_each, step, np.array(rewards), merits):
            for place in range(ends[index] - len(attempts[index]), ends[index]):
                known.setdefault(place, []).append(choice.value)
    places = dict(sorted(known.items()))
    return Chosen(
        step=step, rollouts=rollouts, places=places, batch=batch, evaluation=evaluation, advantages=advantages
    )


def _indices(
    choice: Keep, count: int, step: int, rewards: Float[np.ndarray, " A"], advantages: Float[np.ndarray, " A"]
) -> Sequence[int]:
    """Returns the indices of the attempts that a choice keeps.

    Args:
        rewards: [A] of each attempt; NaN if none was given.
        advantages: [A] mean advantage of each attempt.
    """
    everything = range(len(rewards))
    if choice is Keep.ALL:
        return everything
    if choice is Keep.FIRST:
        return everything[:count]
    if choice is Keep.RANDOM:
        return random.Random(f"samples of step {step}").sample(everything, min(count, len(everything)))
    scored = np.flatnonzero(~np.isnan(rewards))
    rewards, advantages = rewards[scored], advantages[scored]
    # Both give ties in the order of the batch.
    keys = (-advantages, -rewards) if choice is Keep.BEST else (advantages, rewards)
    return scored[np.lexsort(keys)[:count]].tolist()


def mean_advantages(batch: TrainBatch) -> Float[np.ndarray, " R"]:
    """Returns [R] the mean advantage of each sequence's tokens in the loss. 0.0 if it has none there."""
    lengths, counted = batch.lengths.numpy(), batch.loss_mask.numpy().astype(np.float64)
    starts = lengths.cumsum() - lengths
    sums = np.add.reduceat(batch.advantages.numpy() * counted, starts)
    return sums / np.add.reduceat(counted, starts).clip(min=1)


def in_digits(tokens: Sequence[int]) -> list[str]:
    """Returns the number of each token as its text, where there is no tokenizer."""
    return list(map(str, tokens))


class SampleFiles:
    """Writes the kept attempts of each step. A thread encodes them, one file after the other."""

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], list[str]]):
        """
        Args:
            folder: of the run.
            decode: returns the text of each of some tokens.
        """
        self._folder = folder / SAMPLES
        self._decode = decode
        self._pieces: dict[int, str] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writes: Future[None] | None = None

    def write(self, chosen: Chosen) -> None:
        """Begins to write the file of a step, in place of one that is there. An evaluation has a file of its own.

        Raises:
            OutputError: see `writing`, about the file before.
        """
        if not chosen.places:
            return
        kind = f"-evaluation-{chosen.evaluation}" if chosen.evaluation else ""
        path = self._folder / f"step-{chosen.step:08d}{kind}.jsonl.gz"
        records = list(self._records(chosen))
        self.wait()
        self._writes = self._thread.submit(_put, path, records)

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            OutputError: see `writing`.
        """
        begun, self._writes = self._writes, None
        if begun:
            begun.result()

    def close(self) -> None:
        """Waits until everything is written, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def rewind(self, done_steps: int | None) -> None:
        """Removes the files of steps after `done_steps`, or all if None."""
        self.wait()
        last = -1 if done_steps is None else done_steps
        for step, _, path in sample_files(self._folder.parent):
            if step > last:
                path.unlink(missing_ok=True)

    def _records(self, chosen: Chosen) -> Iterator[dict[str, Any]]:
        batch, means = chosen.batch, chosen.advantages
        groups = None if batch is None else batch.group.numpy()
        columns = _columns(chosen)
        totals = _rewards(chosen.rollouts)
        for number, (place, why) in enumerate(chosen.places.items()):
            rollout = chosen.rollouts[place]
            record = {"step": chosen.step, "evaluation": chosen.evaluation, "kept_as": why}
            record |= described(rollout, reward=totals[place])
            if means is not None and groups is not None:
                members = (groups == groups[place]).nonzero()[0]
                record["group"] = int(groups[place])
                record["group_attempts"] = len(attempts_in(chosen.rollouts[each] for each in members))
                record["group_rewards"] = [_number(totals[each]) for each in members.tolist()]
                record["group_advantages"] = _numbers(means[members])
                record["group_place"] = int((members == place).argmax())
            tokens = {name: own[number] for name, own in columns.items()}
            yield {**record, "tokens": self._tokens(rollout) | tokens}

    def _tokens(self, rollout: Rollout) -> dict[str, Any]:
        ids = rollout.token_ids.tolist()
        unknown = list(set(ids) - self._pieces.keys())
        self._pieces.update(zip(unknown, self._decode(unknown), strict=True))
        turns = np.full(rollout.num_tokens, -1)
        for number, (start, end) in enumerate(rollout.turns, start=rollout.first_turn):
            turns[start:end] = number
        rewards = rollout.rewards_at_tokens
        return {
            "ids": ids,
            "pieces": [self._pieces[each] for each in ids],
            "sampled": rollout.loss_mask.astype(np.uint8).tolist(),
            "turns": turns.tolist(),
            "versions": rollout.versions.tolist(),
            **({} if rewards is None else {"rewards": _numbers(rewards)}),
        }


def _rewards(rollouts: Sequence[Rollout]) -> list[float]:
    """Returns the total reward of each rollout's attempt, which all of its sequences share."""
    attempts = attempts_in(rollouts)
    return [total for own, total in zip(attempts, rewards_of(attempts), strict=True) for _ in own]


def _columns(chosen: Chosen) -> dict[str, list[list[Any]]]:
    # All kept rollouts at once: rounding a few tokens costs as much as rounding many.
    places, batch = list(chosen.places), chosen.batch
    rollouts = [chosen.rollouts[place] for place in places]
    in_loss: dict[str, list[list[Any]]] = {}
    found = {"rollout_logprobs": [each.rollout_logprobs for each in rollouts]}
    if batch is not None:
        lengths = batch.lengths.numpy()
        ends = lengths.cumsum()[places]
        own = [slice(start, end) for start, end in zip(ends - lengths[places], ends, strict=True)]

        def of_batch(values: Tensor) -> list[np.ndarray]:
            packed = values.numpy()
            return [packed[each] for each in own]

        in_loss["in_loss"] = [row.astype(np.uint8).tolist() for row in of_batch(batch.loss_mask)]
        found["advantages"] = of_batch(batch.advantages)
        if chosen.trainer_logprobs:
            found["trainer_logprobs"] = [chosen.trainer_logprobs[place].numpy() for place in places]
        elif batch.old_logprobs is not None:
            found["trainer_logprobs"] = of_batch(batch.old_logprobs)
    whole = np.array([len(row) for rows in found.values() for row in rows]).cumsum().tolist()
    numbers = _numbers(np.concatenate(list(chain.from_iterable(found.values()))))
    pieces = [numbers[start:end] for start, end in zip([0, *whole], whole, strict=False)]
    return in_loss | {name: pieces[place * len(rollouts) :][: len(rollouts)] for place, name in enumerate(found)}


def _put(path: Path, records: list[dict[str, Any]]) -> None:
    lines = "".join(map(_line, records)).encode()
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(lines, LEVEL, mtime=0))


def _line(record: dict[str, Any]) -> str:
    """Returns the line of a record, as `json_line`, six times as fast where there are many numbers."""
    try:
        return printable(msgspec.json.encode(record).decode()) + "\n"
    except (UnicodeEncodeError, TypeError):
        # Halves of surrogate pairs, and numbers of numpy's.
        return json_line(record)


def described(rollout: Rollout, *, reward: float) -> dict[str, Any]:
    """Returns what is known of a rollout as a whole.

    Args:
        reward: of its attempt.
    """
    return {
        "id": rollout.prompt.id,
        "source": rollout.prompt.source,
        "sample_index": rollout.sample_index,
        "sequence": rollout.sequence,
        "reward": _number(reward),
        "reward_parts": {name: _number(value) for name, value in rollout.reward_parts.items()},
        "reward_weights": dict(rollout.reward_weights),
        "reward_troubles": dict(rollout.reward_troubles),
        "answer": rollout.prompt.answer,
        "finish_reason": rollout.finish_reason.value,
        "ending": rollout.ending,
        "prompt": rollout.prompt.text,
        "response": rollout.text,
        **({"messages": rollout.messages} if rollout.messages else {}),
    }


def sample_files(output: Path) -> list[tuple[int, str, Path]]:
    """Returns step, name of the evaluation's set of prompts if it is one, and path of each file of samples of a run's
    folder, in order."""
    found = [(NAME.fullmatch(path.name), path) for path in (output / SAMPLES).glob("step-*.jsonl.gz")]
    return sorted((int(name[1]), name[2] or "", path) for name, path in found if name)


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file of samples, those before the damage if it is half-written."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except (EOFError, ValueError, OSError, zlib.error):
        return


def _number(value: float) -> float | None:
    """Returns a number that JSON has. None stands for one that is not finite."""
    return value if math.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[float | None]:
    rounded = np.round(values.astype(np.float64), DIGITS)
    return rounded.tolist() if np.isfinite(rounded).all() else [_number(each) for each in rounded.tolist()]
