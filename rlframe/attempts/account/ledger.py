"""The ledger of a run: every prompt that was leased, and how its lease ended. Each line of `ledger.jsonl` is an event.

A lease ends once: trained, or dropped with a reason. One without an end is in flight. Events are kept until `write`,
which the loop calls once a step and before it takes the state of a checkpoint: the file then says what a checkpoint of
that step says. A killed run leaves the events of its finished steps, and leases that are open, among them those whose
end belongs to the step that was under way. A resumed run removes the events of later steps, because it does those steps
again, and goes on with the leases that are open then: they are those of its checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import MsgspecError, Struct, json, to_builtins

from rlframe.types.rollout import Group, Rollout, by_attempt
from rlframe.utils.errors import CheckpointError
from rlframe.utils.files.jsonl import append, keep_steps
from rlframe.utils.files.whole import sync, writing

LEDGER = "ledger.jsonl"


class DropReason(StrEnum):
    """Reasons why a lease, or an attempt of one that was trained on, ended without being trained on."""

    FLAT_ALL_RIGHT = "flat_all_right"
    """Each attempt was right, so that the group has no signal."""
    FLAT_ALL_WRONG = "flat_all_wrong"
    """Each attempt was wrong."""
    FLAT_OTHER = "flat_other"
    """Each attempt got the same reward in between."""
    FLAT_UNSCORED = "flat_unscored"
    """No reward scored any attempt."""
    LEFT_OVER = "left_over"
    """The group had a signal, but its batch was trained on in whole minibatches without it."""
    PASSED_OVER = "passed_over"
    """The curriculum left the prompt out in this epoch, for the pass rate of its attempts before."""
    OVERSAMPLED = "oversampled"
    """The step had enough groups without it."""
    TIMED_OUT = "timed_out"
    """The deadline passed."""
    FAILED = "failed"
    """The environment raised an error, took too long, died, or gave no answer."""
    MASKED = "masked"
    """The environment, or a limit of its settings, said that it must not be trained on."""
    UNSUCCESSFUL = "unsuccessful"
    """None of the attempts became a rollout, or too few to be compared."""


class Noted(Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower, gc=False):
    """An event of a lease."""

    step: int
    """Step that was under way when the event was written."""
    lease: int
    """Ordinal of the lease."""

    @property
    def event(self) -> str:
        """The kind of the event, as in the file."""
        return type(self).__name__.lower()


class Leased(Noted, frozen=True, kw_only=True, gc=False):
    """A prompt was taken from the stream."""

    prompt: str
    """Id of the prompt."""
    epoch: int
    """Epoch of the prompt within its own dataset, from 0."""


class Trained(Noted, frozen=True, kw_only=True, gc=False):
    """The group of a lease was trained on."""

    trained_at: int
    """Step that trained on it."""
    version: int
    """Policy version of the weights with which that step began: `trained_at - 1`."""
    tokens: list[int]
    """Number of sampled tokens of each rollout."""
    oldest: int | None
    """Oldest policy version of a sampled token. None if no policy sampled any."""
    newest: int | None
    """Newest policy version of a sampled token."""
    lag_sum: int
    """Sum over the tokens that a policy sampled of `version` minus the version of the token."""
    lag_tokens: int
    """Number of tokens that a policy sampled."""
    lost: dict[str, list[int]] = {}
    """Sampled tokens of each attempt that did not become a rollout of the group, by reason."""


class Dropped(Noted, frozen=True, kw_only=True, gc=False):
    """A lease ended without being trained on."""

    reason: str
    """A DropReason."""
    tokens: int
    """Number of sampled tokens thrown away."""
    lengths: list[int]
    """Number of sampled tokens of each attempt."""


class Carried(Noted, frozen=True, kw_only=True, gc=False):
    """A step took its groups without that of a lease, whose attempts go on in the next step."""

    tokens: int
    """Number of tokens that were sampled for it so far."""


Event = Leased | Trained | Dropped | Carried
EVENTS = json.Decoder(Event)
"""Reads lines. What later versions say beyond the fields is left out."""


class Ledger:
    """Writes the ledger of a run."""

    def __init__(self, output: Path, *, done_steps: int = 0):
        """
        Args:
            output: the run's folder.
            done_steps: steps of the checkpoint from which the run resumes; events of later steps are removed.
        """
        self.file = output / LEDGER
        self._waiting: list[dict[str, Any]] = []
        self.rewind(done_steps)

    def leased(self, lease: int, *, prompt: str, epoch: int) -> None:
        """Notes that a prompt was taken."""
        self._note(Leased(step=0, lease=lease, prompt=prompt, epoch=epoch))

    def trained(
        self,
        lease: int,
        group: Group,
        *,
        step: int,
        lost: Mapping[DropReason, Sequence[Rollout]] | None = None,
    ) -> None:
        """Notes that step `step` trained on the group of a lease.

        Args:
            lost: attempts of the lease that are not among the group's rollouts.
        """
        lags = np.concatenate([np.zeros(0, dtype=np.int64), *(step - 1 - _versions(each) for each in group.rollouts)])
        self._note(
            Trained(
                step=0,
                lease=lease,
                trained_at=step,
                version=step - 1,
                tokens=_lengths(group.rollouts),
                oldest=step - 1 - int(lags.max()) if len(lags) else None,
                newest=step - 1 - int(lags.min()) if len(lags) else None,
                lag_sum=int(lags.sum()),
                lag_tokens=len(lags),
                lost={reason.value: _lengths(attempts) for reason, attempts in (lost or {}).items()},
            )
        )

    def dropped(self, lease: int, reason: DropReason, attempts: Sequence[Rollout]) -> None:
        """Notes that a lease ended without being trained on.

        Args:
            attempts: everything that was sampled for it, finished or not.
        """
        lengths = _lengths(attempts)
        self._note(Dropped(step=0, lease=lease, reason=reason.value, tokens=sum(lengths), lengths=lengths))

    def carried(self, lease: int, attempts: Sequence[Rollout]) -> None:
        """Notes that a step took its groups without that of a lease, which stays open.

        Args:
            attempts: everything that was sampled for it so far.
        """
        self._note(Carried(step=0, lease=lease, tokens=sum(_lengths(attempts))))

    def write(self, step: int) -> None:
        """Writes all events since the last call, as those of step `step`, and flushes them to the disk.

        Raises:
            OutputError: the file cannot be written.
        """
        events, self._waiting = self._waiting, []
        if events:
            append(self.file, *({**event, "step": step} for event in events))
            with writing(self.file):
                sync(self.file)

    def rewind(self, done_steps: int) -> None:
        """Removes the events of steps after `done_steps`, and those that were not written."""
        self._waiting.clear()
        keep_steps(self.file, done_steps)

    def open_leases(self) -> dict[int, Leased]:
        """Returns the leases in the file that have no end, which after `rewind` are those of the checkpoint.

        Raises:
            CheckpointError: see `read_ledger`.
        """
        return open_among(read_ledger(self.file.parent).events) if self.file.exists() else {}

    def _note(self, event: Event) -> None:
        self._waiting.append({"step": event.step, **to_builtins(event)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The events in a ledger."""

    events: list[Event]
    torn: bool
    """Whether the last line is half-written, as a crash of the machine leaves it."""


def read_ledger(output: Path) -> Account:
    """Returns the events in the ledger of a run's folder.

    Raises:
        CheckpointError: the file cannot be read, or a line other than the last is not an event.
    """
    file = output / LEDGER
    try:
        whole, _, last = file.read_bytes().rpartition(b"\n")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    try:
        events = EVENTS.decode_lines(whole)
    except MsgspecError as error:
        raise _damage(file, whole) from error
    return Account(events=events, torn=bool(last))


def open_among(events: Iterable[Event]) -> dict[int, Leased]:
    """Returns the leases without an end, by ordinal."""
    found: dict[int, Leased] = {}
    for event in events:
        if isinstance(event, Leased):
            found[event.lease] = event
        elif not isinstance(event, Carried):
            found.pop(event.lease, None)
    return found


def _damage(file: Path, lines: bytes) -> CheckpointError:
    """Returns the error about the first line that is not an event."""
    for number, line in enumerate(lines.split(b"\n"), start=1):
        try:
            EVENTS.decode(line)
        except MsgspecError as error:
            return CheckpointError(
                f"{file}:{number} is damaged, or was not written by this version of rlframe: {error}"
            )
    raise AssertionError("every line is an event")


def _versions(rollout: Rollout) -> np.ndarray:
    """Returns the version of each token that a policy sampled."""
    versions = rollout.versions[rollout.loss_mask].astype(np.int64)
    return versions[versions >= 0]


def _lengths(attempts: Iterable[Rollout]) -> list[int]:
    """Returns the number of sampled tokens of each attempt, whose sequences count together."""
    return [sum(each.num_sampled_tokens for each in sequences) for sequences in by_attempt(attempts)]
