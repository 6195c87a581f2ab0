"""Verifies from a run's ledger that no prompt was lost or used twice: `python -m rlframe.tools.audit OUTPUT`.

Works on a finished run, on one that was killed, and on one that is running. Prints how many leases ended how, the lag
of trained tokens, and the lengths of responses that were trained on and of those that were thrown away. Ends with
status 1 if something is wrong, with sentences that name the leases, and with 2 if there is nothing to verify.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlframe.attempts.account.ledger import (
    LEDGER,
    Account,
    Carried,
    Dropped,
    DropReason,
    Leased,
    Trained,
    open_among,
    read_ledger,
)
from rlframe.attempts.buffer import oversampled
from rlframe.loops.saving.manifest import named_checkpoints, step_of
from rlframe.rollout.base.config import OversampleRest
from rlframe.utils.arguments import Parser, run_tool
from rlframe.utils.errors import CheckpointError
from rlframe.utils.text import printable

SHOWN = 20
"""Greatest number of sentences of one kind, and of leases in flight that are listed."""
QUANTILES = {"10 %": 0.1, "50 %": 0.5, "90 %": 0.9, "longest": 1.0}
NOTHING_TO_VERIFY = 2
"""Exit status where there is no ledger."""


@dataclass(kw_only=True)
class Life:
    """The events of one lease."""

    taken: list[Leased] = field(default_factory=list)
    ends: list[Trained | Dropped] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)


class Run:
    """A run's settings, and its events by kind."""

    def __init__(self, output: Path, account: Account):
        """Reads the settings and sorts the events.

        Raises:
            CheckpointError: `config.yaml` cannot be read.
        """
        settings = read_settings(output / "config.yaml")
        self.steps: int = settings["steps"]
        self.prompts_per_step: int = settings["prompts_per_step"]
        self.group_size: int | None = (settings.get("algorithm") or {}).get("group_size")
        # Runs of before the setting were synchronous.
        self.max_policy_lag: int = (settings.get("loop") or {}).get("max_policy_lag", 0)
        rollout = settings.get("rollout") or {}
        self.oversample: float = rollout.get("oversample", 1.0)
        rest = OversampleRest(rollout.get("oversample_rest", OversampleRest.CARRY))
        self.rest = rest if self.oversample > 1 else None
        """Fate of the groups that a step did not wait for. None if each step waited for all."""
        self.streaming: bool = (settings.get("data") or {}).get("streaming", False)
        """Whether the data was read as it was needed, so that repeated records were dealt repeatedly."""
        self.torn = account.torn
        self.open = open_among(account.events)
        self.leased = [event for event in account.events if isinstance(event, Leased)]
        self.ends = [event for event in account.events if isinstance(event, Trained | Dropped)]
        self.trained = [event for event in account.events if isinstance(event, Trained)]
        self.dropped = [event for event in account.events if isinstance(event, Dropped)]
        self.carried = [event for event in account.events if isinstance(event, Carried)]
        self.last_step = max((event.step for event in account.events), default=0)
        self.saved_step = max(map(step_of, named_checkpoints(output / "checkpoints")), default=0)
        self.begun = {event.lease: event for event in reversed(self.leased)}
        """The first beginning of each lease."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the account of the run on the command line. Returns the exit status."""
    parser = Parser(prog="python -m rlframe.tools.audit", description=__doc__)
    parser.add_argument("output", type=Path, help="the run's folder")
    output: Path = parser.parse_args(arguments).output
    if not (output / LEDGER).exists():
        print(printable(_no_ledger(output)), file=sys.stderr)
        return NOTHING_TO_VERIFY
    try:
        run = Run(output, read_ledger(output))
    except CheckpointError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    for line in report(run):
        print(printable(line))
    wrong = list(faults(run))
    for sentence in wrong:
        print(printable(f"wrong: {sentence}"), file=sys.stderr)
    if not wrong:
        print("every lease ended once or is in flight, and nothing was trained on twice or too late")
    return 1 if wrong else 0


def read_settings(file: Path) -> Mapping[str, Any]:
    """Returns the settings of a run.

    Raises:
        CheckpointError: the file cannot be read, or is not that of a run.
    """
    try:
        settings = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not readable YAML: {error}") from error
    if not isinstance(settings, dict) or not {"steps", "prompts_per_step"} <= settings.keys():
        raise CheckpointError(f"{file} is not the configuration of a run: it has no steps and prompts_per_step")
    return settings


def report(run: Run) -> Iterator[str]:
    """Yields the lines that describe a run, right or wrong."""
    done = max((event.trained_at for event in run.trained), default=0)
    yield f"steps: {done} of {run.steps}, {run.prompts_per_step} prompts each"
    reasons = Counter(event.reason for event in run.dropped)
    yield (
        f"leases: {len(run.begun)}, of which {len(run.trained)} trained on, {len(run.dropped)} dropped, "
        f"{len(run.open)} in flight"
    )
    for reason, count in reasons.most_common():
        yield f"{count:>8}  dropped: {reason}"
    if run.carried:
        leases = len({event.lease for event in run.carried})
        yield f"{len(run.carried):>8}  times that a step carried a group over, of {leases} leases"
    for lease in islice(run.open.values(), SHOWN):
        yield f"in flight: {_named(lease)}, since step {lease.step}"
    if len(run.open) > SHOWN:
        yield f"in flight: and {len(run.open) - SHOWN} more"
    repeated = len(_repeated(run)) if run.streaming else 0
    if repeated:
        yield f"{repeated} prompts came more than once in an epoch, as repeated records do with data.streaming=true"
    if run.torn:
        yield f"the last line of {LEDGER} is half-written: events of step {run.last_step} or later are missing"
    lags = [event.version - event.oldest for event in run.trained if event.oldest is not None]
    tokens = sum(event.lag_tokens for event in run.trained)
    if tokens:
        mean = sum(event.lag_sum for event in run.trained) / tokens
        yield f"lag of trained tokens: {mean:.3g} on average, {max(lags)} at most, {run.max_policy_lag} allowed"
    yield ""
    yield from length_table(run)


def length_table(run: Run) -> Iterator[str]:
    """Yields the distribution of the responses' lengths: of those trained on, and of those thrown away by reason."""
    trained = list(chain.from_iterable(event.tokens for event in run.trained))
    dropped: defaultdict[str, list[int]] = defaultdict(list)
    for event in run.dropped:
        dropped[f"dropped: {event.reason}"] += event.lengths
    for event in run.trained:
        for reason, lengths in event.lost.items():
            dropped[f"lost to a trained group: {reason}"] += lengths
    thrown = [length for lengths in dropped.values() for length in lengths]
    rows = {"trained on": trained, "thrown away": thrown, **dict(sorted(dropped.items()))}
    width = max(map(len, rows))
    yield f"{'sampled tokens':<{width}}  responses      mean" + "".join(f"{name:>10}" for name in QUANTILES)
    for name, lengths in rows.items():
        if lengths:
            counts = np.array(lengths)
            numbers = [np.mean(counts), *np.quantile(counts, list(QUANTILES.values()))]
            yield f"{name:<{width}}{len(lengths):>11}" + "".join(f"{number:>10.1f}" for number in numbers)
    if trained and thrown and np.mean(trained):
        ratio = np.mean(thrown) / np.mean(trained)
        yield f"what was thrown away is {ratio:.2f} times as long as what was trained on; {sum(thrown)} tokens in all"


def faults(run: Run) -> Iterator[str]:
    """Yields a sentence for everything that is wrong, the first SHOWN of each kind."""
    checks: tuple[Callable[[Run], Iterator[str]], ...] = (
        ended_once,
        leased_once,
        nothing_skipped,
        fresh,
        forgotten,
        full_steps,
        left_out,
        whole_groups,
        complete,
    )
    for check in checks:
        found = list(check(run))
        yield from found[:SHOWN]
        if len(found) > SHOWN:
            yield f"and {len(found) - SHOWN} more like the last one"


def ended_once(run: Run) -> Iterator[str]:
    """Yields leases that ended twice, were taken twice or were never taken."""
    for lease, life in lives(run).items():
        if len(life.taken) > 1:
            yield f"lease {lease} was taken {len(life.taken)} times: {', '.join(map(_named, life.taken))}"
        if not life.taken:
            yield f"lease {lease} was {_told(life.ends[0])}, but never taken"
        if len(life.ends) > 1:
            ends = ", ".join(map(_told, life.ends))
            yield f"lease {lease} ended {len(life.ends)} times: {ends}"
        for step, count in Counter(event.step for event in life.carried).items():
            # Whoever is carried over from a step may still be dropped before its checkpoint.
            if ended := [end for end in life.ends if end.step + isinstance(end, Dropped) <= step]:
                yield f"lease {lease} was {_told(ended[0])}, and yet carried over from step {step}"
            if count > 1:
                yield f"lease {lease} was carried over {count} times from step {step}"


def lives(run: Run) -> Mapping[int, Life]:
    """Returns the events of each lease that has others than a beginning and at most one end."""
    begun, ended = Counter(event.lease for event in run.leased), Counter(event.lease for event in run.ends)
    chosen = {lease for counts in (begun, ended) for lease, count in counts.items() if count > 1}
    chosen |= (ended.keys() - begun.keys()) | {event.lease for event in run.carried}
    found = {lease: Life() for lease in sorted(chosen)}
    for event in run.leased:
        if event.lease in chosen:
            found[event.lease].taken.append(event)
    for event in run.ends:
        if event.lease in chosen:
            found[event.lease].ends.append(event)
    for event in run.carried:
        found[event.lease].carried.append(event)
    return found


def leased_once(run: Run) -> Iterator[str]:
    """Yields prompts that were leased more than once in an epoch, unless their records may be repeated."""
    if run.streaming:
        return
    for (prompt, epoch), leases in _repeated(run).items():
        yield f"prompt {prompt} of epoch {epoch} was leased {len(leases)} times: leases {_listed(leases)}"


def nothing_skipped(run: Run) -> Iterator[str]:
    """Yields prompts that were leased in an epoch, but not in the one before."""
    if not any(event.epoch for event in run.leased):
        return
    leased = {(event.prompt, event.epoch): event.lease for event in run.begun.values()}
    for (prompt, epoch), lease in leased.items():
        if epoch > 0 and (prompt, epoch - 1) not in leased:
            yield f"prompt {prompt} was skipped in epoch {epoch - 1}: lease {lease} is of epoch {epoch}"


def fresh(run: Run) -> Iterator[str]:
    """Yields leases with tokens that were older than allowed when they were trained on, or newer than the policy."""
    for event in run.trained:
        if event.version != event.trained_at - 1:
            yield (
                f"lease {event.lease} was trained on at step {event.trained_at} with weights of version {event.version}"
                f", which that step does not begin with"
            )
        if event.oldest is None or event.newest is None:
            continue
        if event.version - event.oldest > run.max_policy_lag:
            yield (
                f"lease {event.lease} was trained on at step {event.trained_at} with tokens of version {event.oldest}, "
                f"which are {event.version - event.oldest} behind; loop.max_policy_lag={run.max_policy_lag}"
            )
        if event.newest > event.version:
            yield (
                f"lease {event.lease} was trained on at step {event.trained_at} with tokens of version {event.newest}, "
                f"which was published later"
            )


def forgotten(run: Run) -> Iterator[str]:
    """Yields leases in flight that can no longer be trained on, because their tokens are too old by now."""
    done = max((event.trained_at for event in run.trained), default=0)
    for lease in run.open.values():
        # Its attempts began with a policy of version `step - 1` at the latest.
        if done > (last := lease.step + run.max_policy_lag):
            yield (
                f"{_named(lease)} was forgotten: taken in step {lease.step}, it had to end by step {last} with "
                f"loop.max_policy_lag={run.max_policy_lag}, and step {done} is done"
            )


def full_steps(run: Run) -> Iterator[str]:
    """Yields steps with more groups than prompts_per_step, or with fewer although none was dropped."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for event in run.trained:
        groups[event.trained_at].append(event.lease)
    # Who was one too many, or was not attempted, explains nothing.
    unexplained = (DropReason.OVERSAMPLED, DropReason.PASSED_OVER)
    dropped = {event.step for event in run.dropped if event.reason not in unexplained}
    for step in range(1, max(groups, default=0) + 1):
        count, expected = len(groups[step]), run.prompts_per_step
        # What the half-written line and those after it would have said is not known.
        unknown = run.torn and step >= run.last_step
        explained = unknown or (step in dropped and count > 0)
        if count > expected or (count < expected and not explained):
            why = ", and none was dropped in that step" if step not in dropped and count < expected else ""
            which = f", leases {_listed(groups[step])}" if count else ""
            yield f"step {step} trained on {count} groups, not on prompts_per_step={expected}{why}{which}"


def left_out(run: Run) -> Iterator[str]:
    """Yields groups that were carried over or thrown away against the settings, and steps that threw away more than
    they had begun in excess."""
    settings = f"rollout.oversample={run.oversample:g}, rollout.oversample_rest={run.rest or OversampleRest.CARRY}"
    if run.rest is not OversampleRest.CARRY:
        for event in run.carried:
            yield f"lease {event.lease} was carried over from step {event.step} with {settings}"
    excess = oversampled(run.prompts_per_step, run.oversample) - run.prompts_per_step
    thrown: defaultdict[int, list[int]] = defaultdict(list)
    for event in run.dropped:
        if event.reason == DropReason.OVERSAMPLED:
            thrown[event.step].append(event.lease)
    for step, leases in thrown.items():
        if run.rest is not OversampleRest.DROP or len(leases) > excess:
            allowed = excess if run.rest is OversampleRest.DROP else 0
            yield (
                f"step {step} threw {len(leases)} groups away because it had enough without them, leases "
                f"{_listed(leases)}; {settings} allows {allowed}"
            )


def whole_groups(run: Run) -> Iterator[str]:
    """Yields leases with fewer rollouts than `algorithm.group_size` whose other attempts are not accounted for."""
    for event in run.trained:
        count = len(event.tokens) + sum(map(len, event.lost.values()))
        if run.group_size is not None and count < run.group_size:
            missing = run.group_size - count
            yield (
                f"lease {event.lease} was trained on at step {event.trained_at} with {len(event.tokens)} rollouts; "
                f"nothing says what became of {missing} of algorithm.group_size={run.group_size}"
            )


def complete(run: Run) -> Iterator[str]:
    """Yields a sentence if the ledger ends before the newest checkpoint."""
    if run.saved_step > run.last_step:
        yield f"{LEDGER} ends in step {run.last_step}, but there is a checkpoint of step {run.saved_step}"


def _repeated(run: Run) -> Mapping[tuple[str, int], list[int]]:
    """Returns the leases of each prompt that was leased more than once in an epoch."""
    counts = Counter((event.prompt, event.epoch) for event in run.begun.values())
    found: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for lease, event in reversed(run.begun.items()):
        if counts[event.prompt, event.epoch] > 1:
            found[event.prompt, event.epoch].append(lease)
    return dict(found)


def _no_ledger(output: Path) -> str:
    if not output.is_dir():
        return f"{output} is not a folder"
    if not (output / "config.yaml").exists():
        return f"{output} is not the folder of a run: it has no config.yaml"
    return (
        f"{output} has no {LEDGER}: the run ended before its first step, samples nothing, or was made by a version of "
        "rlframe that kept none. There is nothing to verify"
    )


def _named(lease: Leased) -> str:
    return f"lease {lease.lease} (prompt {lease.prompt}, epoch {lease.epoch})"


def _told(end: Trained | Dropped) -> str:
    if isinstance(end, Trained):
        return f"trained on at step {end.trained_at}"
    return f"dropped in step {end.step} ({end.reason})"


def _listed(leases: Sequence[int]) -> str:
    shown = ", ".join(map(str, leases[:SHOWN]))
    return shown if len(leases) <= SHOWN else f"{shown} and {len(leases) - SHOWN} more"


if __name__ == "__main__":
    run_tool(main)
