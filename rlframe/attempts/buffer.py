"""The buffer between sampling and training: which leases may be opened, and which finished groups are trained on next.

Lag is bounded by how many leases are open, and by the order in which groups are taken. Nothing that is finished is
thrown away for its age.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlframe.attempts.account.leases import Lease
from rlframe.attempts.account.ledger import DropReason
from rlframe.rollout.base.config import OversampleRest
from rlframe.types.rollout import Group, Rollout

LeftOut = Mapping[DropReason, list[Rollout]]
"""Attempts that did not become rollouts of their group, as far as they came, by reason."""


def main_reason(lost: LeftOut) -> DropReason:
    """Returns the gravest reason for which attempts were left out of a group that is dropped for want of them."""
    reasons = (DropReason.FAILED, DropReason.TIMED_OUT, DropReason.MASKED)
    return next((reason for reason in reasons if reason in lost), DropReason.UNSUCCESSFUL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A lease with its finished group."""

    lease: Lease
    group: Group
    lost: LeftOut = field(default_factory=dict)
    """The attempts that are left out of the group, by reason."""


class Buffer:
    """The open leases of a run, and the finished groups among them.

    Example: P = 2 and a lag of at most 1: four leases are opened at version 0. Two groups train at version 0, and two
    more leases are opened at version 1, where the other two of version 0 must be trained, however long they take.
    """

    def __init__(
        self,
        *,
        prompts_per_step: int,
        max_policy_lag: int,
        pipeline_depth: int,
        oversample: float = 1.0,
        rest: OversampleRest = OversampleRest.CARRY,
    ):
        """
        Args:
            prompts_per_step: number P of groups of a step.
            max_policy_lag: greatest difference between the version that trains on a token and the one that sampled it.
            pipeline_depth: number of further steps whose leases are open during a step.
            oversample: above 1, as many times P leases are open during a step, and none of further steps.
            rest: what the caller does with leases that are open when P groups are taken.
        """
        self.prompts_per_step, self.max_policy_lag = prompts_per_step, max_policy_lag
        self.oversamples = oversample > 1
        self.rest = rest if self.oversamples else None
        """Fate of the leases that are open when P groups are taken, with oversampling. None without it."""
        self.limit = (min(max_policy_lag, pipeline_depth) + 1) * prompts_per_step
        """Greatest number of open leases, those being trained on included."""
        if self.oversamples:
            self.limit = oversampled(prompts_per_step, oversample)
        self._open: dict[int, Lease] = {}
        """The leases whose groups were not taken, by ordinal."""
        self._finished: dict[int, Finished] = {}
        self._taken: dict[int, Lease] = {}
        """The leases whose groups are being trained on."""

    @property
    def open(self) -> list[Lease]:
        """The leases whose groups were not taken."""
        return list(self._open.values())

    @property
    def waiting(self) -> list[Finished]:
        """The finished groups that were not taken."""
        return list(self._finished.values())

    def lease(self, ordinal: int) -> Lease:
        """Returns an open lease."""
        return self._open[ordinal]

    @property
    def unfinished(self) -> list[Lease]:
        """The open leases whose groups are not finished."""
        return [lease for ordinal, lease in self._open.items() if ordinal not in self._finished]

    @property
    def room(self) -> int:
        """Number of leases that may be opened now."""
        return self.limit - len(self._open) - len(self._taken)

    def add(self, lease: Lease) -> None:
        """Opens a lease."""
        assert self.room > 0, f"lease {lease.ordinal} is one too many: {len(self._open)} are open"
        assert lease.ordinal not in self._open | self._taken, f"lease {lease.ordinal} is opened twice"
        self._open[lease.ordinal] = lease

    def put(self, ordinal: int, group: Group, lost: LeftOut | None = None) -> None:
        """Puts the finished group of an open lease."""
        assert ordinal in self._open, f"lease {ordinal} is not open"
        assert ordinal not in self._finished, f"the group of lease {ordinal} is finished already"
        self._finished[ordinal] = Finished(lease=self._open[ordinal], group=group, lost=lost or {})

    def drop(self, ordinal: int) -> Lease:
        """Ends an open lease without training on it."""
        self._finished.pop(ordinal, None)
        return self._open.pop(ordinal)

    def take(self, version: int) -> list[Finished] | None:
        """Returns P finished groups to train on in the order of their leases, or None if more must finish first.

        Those that must be trained soonest are taken first. Whoever waits for more waits for groups that may not become
        older, so that each of the others can still be trained in time.

        Args:
            version: policy version that trains on them.
        """
        chosen = self._chosen(version)
        return None if chosen is None else self.release(sorted(chosen))

    def is_ready(self, version: int) -> bool:
        """Returns whether `take` would return groups."""
        return self._chosen(version) is not None

    def _chosen(self, version: int) -> list[int] | None:
        by_urgency = sorted(self._finished, key=lambda ordinal: (self._open[ordinal].version, ordinal))
        chosen = by_urgency[: self.prompts_per_step]
        enough = len(chosen) == self.prompts_per_step and self._in_time(chosen, version)
        return chosen if enough else None

    def release(self, ordinals: list[int]) -> list[Finished]:
        """Returns the finished groups of these leases, which are being trained on until `settle`."""
        taken = [self._finished.pop(each) for each in ordinals]
        self._taken |= {each: self._open.pop(each) for each in ordinals}
        return taken

    def clear(self) -> None:
        """Forgets all leases."""
        self._open.clear()
        self._finished.clear()
        self._taken.clear()

    def settle(self) -> None:
        """Ends the leases that were trained on."""
        self._taken.clear()

    def _in_time(self, chosen: list[int], version: int) -> bool:
        """Returns whether every other open lease can still be trained within the lag if `chosen` are trained now, or is
        dropped."""
        if self.rest is OversampleRest.DROP:
            return True
        left = Counter(lease.version for ordinal, lease in self._open.items() if ordinal not in set(chosen))
        due = 0
        for begun in sorted(left):
            due += left[begun]
            steps = begun + self.max_policy_lag - version
            if due > steps * self.prompts_per_step:
                return False
        return True


def oversampled(prompts_per_step: int, oversample: float) -> int:
    """Returns the number of groups that a step begins.

    Example:
        >>> oversampled(10, 1.1), oversampled(3, 1.5)
        (11, 5)
    """
    # 10 * 1.1 is a little more than 11 in binary.
    return math.ceil(round(prompts_per_step * oversample, 6))
