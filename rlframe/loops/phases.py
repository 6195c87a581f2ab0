"""Phases: named, timed parts of a step that use the devices."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rlframe.cluster.watch.activities import phase as watched_phase


class Sleeper(Protocol):
    """A role that can free its devices' memory and allocate it again."""

    def sleep(self) -> None:
        """Releases device memory; weights may be dropped."""

    def wake(self) -> None:
        """Allocates the memory again, so that the role can work."""


class Phases:
    """Times phases. If roles share devices, wakes the role of a phase and puts the others to sleep."""

    def __init__(
        self,
        *,
        sharing: list[Sleeper],
        announce: Callable[[str], None],
        ended: Callable[[str, object, float, float], None] | None = None,
        asleep: Collection[Sleeper] = (),
    ):
        """
        Args:
            sharing: roles that must sleep when a phase runs on another one; empty if there is memory for all.
            announce: called with the name of each phase as it begins, for the progress bar.
            ended: called with the name of each phase as it ends, its role, its seconds, those of phases inside it
                included, and the seconds in which roles were put to sleep and woken for it.
            asleep: those of `sharing` that sleep already.
        """
        self._awake = {id(role): role not in asleep for role in sharing}
        self._sharing = sharing
        self._announce = announce
        self._ended = ended
        self._seconds: dict[str, float] = {}
        self._busy: dict[int, float] = {}
        """Seconds of the step's phases in which a role works, by its identity."""
        self._began: float | None = None
        """Time at which the first phase of the step began."""
        self._inside: list[float] = []
        """Seconds of the phases inside each phase that is under way, the outermost first."""
        self._changes: list[float] = []
        """Seconds in which roles were put to sleep and woken for each phase that is under way, the outermost first."""
        self.totals: dict[str, float] = {}
        """Seconds of each phase over the whole run."""

    @contextmanager
    def __call__(self, name: str, *, on: object = None, beside: object = None) -> Iterator[None]:
        """Runs the block as phase `name`, on the role `on` if it needs devices. The time of a phase inside it is not
        its own.

        Args:
            beside: a role that works in it, though no role must sleep for it.
        """
        self._announce(name)
        start = time.monotonic()
        self._began = start if self._began is None else self._began
        self._inside.append(0.0)
        self._changes.append(0.0)
        try:
            with watched_phase(name):
                if on is not None:
                    self.sleep_others(on)
                yield
        finally:
            whole, inside, changing = time.monotonic() - start, self._inside.pop(), self._changes.pop()
            if self._inside:
                self._inside[-1] += whole
                self._changes[-1] += changing
        elapsed = whole - inside
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed
        works = id(on or beside)
        self._busy[works] = self._busy.get(works, 0.0) + elapsed
        self.totals[name] = self.totals.get(name, 0.0) + elapsed
        if self._ended:
            self._ended(name, on, whole, changing)

    def sleep_others(self, on: object) -> None:
        """Wakes the role `on` and puts the roles that share its devices to sleep."""
        self._change(on, wakes=True)

    def make_room(self, coming: object) -> None:
        """Puts the roles that share devices with the role `coming` to sleep, before it takes a part of its memory.
        Wakes nobody. It is a phase, if there is one to put to sleep."""
        others = [role for role in self._sharing if role is not coming]
        if len(others) < len(self._sharing) and any(self._awake[id(role)] for role in others):
            with self("make_room"):
                self._change(coming, wakes=False)

    def _change(self, on: object, *, wakes: bool) -> None:
        # Sleep before wake: the role that wakes needs the memory that the others free.
        for role in sorted(self._sharing, key=lambda role: role is on):
            if self._awake[id(role)] != (role is on) and (wakes or role is not on):
                start = time.monotonic()
                (role.wake if role is on else role.sleep)()
                self._awake[id(role)] = role is on
                if self._changes:
                    self._changes[-1] += time.monotonic() - start

    def begin_anew(self, *roles: Sleeper) -> None:
        """Puts the roles that share devices with `roles` to sleep, because the processes of `roles` restart awake.
        Forgets the present step."""
        for role in self._sharing:
            if role in roles:
                self._awake[id(role)] = True
            elif self._awake[id(role)]:
                role.sleep()
                self._awake[id(role)] = False
        self.next_step()

    def next_step(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last call, and starts again."""
        seconds, self._seconds, self._busy, self._began = self._seconds, {}, {}, None
        return seconds

    def step_times(self, roles: Mapping[str, object]) -> dict[str, float]:
        """Returns `time/NAME_s` of each phase of the step, `time/step_s` by the clock since its first phase began,
        `time/other_s` outside of phases, and `time/ROLE_idle_fraction`, the part of the step in which a role did not
        work. Starts again.

        Args:
            roles: by name.
        """
        whole = 0.0 if self._began is None else time.monotonic() - self._began
        busy = {name: self._busy.get(id(role), 0.0) for name, role in roles.items()}
        seconds = self.next_step()
        seconds |= {"other": whole - sum(seconds.values()), "step": whole}
        idle = {f"time/{role}_idle_fraction": 1 - own / whole if whole else 0.0 for role, own in busy.items()}
        return {f"time/{name}_s": value for name, value in seconds.items()} | idle
