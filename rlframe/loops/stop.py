"""The early end of a run: after SIGTERM or Ctrl-C it finishes the step and saves, once."""

import os
import signal
from collections.abc import Callable, Generator
from typing import Any

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
AGAIN = "the same command resumes from there"
AGAIN_FROM_LAST = "the same command resumes from the last checkpoint, if any"
BEFORE_STEPS = "before any step; the same command begins it again, or resumes from the last checkpoint, if any"
BETWEEN_STEPS = "between steps; the same command resumes from the last checkpoint, if any"


class Stopped(KeyboardInterrupt):
    """Ends the run because a signal requested it. (Ray turns it into a plain KeyboardInterrupt on its way.)"""

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence)
        self.code = code


def failure(error: BaseException | None) -> BaseException | None:
    """Returns the error that ended a run. None if it ended well, be it before its last step because a callback wanted
    it."""
    return None if isinstance(error, Stopped) and error.code == 0 else error


class Stop:
    """A request to end the run, and its outcome. Without `listen` no signal can request it."""

    def __init__(self, *, patience_s: float = 0.0, still_ours: Callable[[], None] = lambda: None):
        """
        Args:
            patience_s: seconds that a step may take after the first signal.
            still_ours: called before each step; raises if the run must not write any more.
        """
        self.patience_s, self.still_ours = patience_s, still_ours
        self.code = 0
        """Exit code for the first signal. 0 while there was none."""
        self.sentence = ""
        """Sentence about how the run ended."""
        self.outside_steps = BEFORE_STEPS
        """End of the sentence about a run that a signal ends outside of its steps."""
        self._asked_by = ""
        self._saves = True
        self._step: int | None = None
        self._in_time = False
        """Whether the step has ended, so that the rest may take any time."""
        self._saved: int | None = None
        """Number of the newest step whose save has begun."""
        self._raised = False
        self.signalled = False
        """Whether a signal has requested the end."""
        self.at_once = False
        """Whether a second signal has ended the run, so that nothing waits any more."""

    def listen(self) -> None:
        """Handles the signals from here on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        signal.signal(signal.SIGALRM, self._late)

    def ask(self, reason: str, *, code: int = 1, saves: bool = True) -> None:
        """Makes the present step the last one. May be called from any thread.

        Args:
            reason: beginning of the closing sentence, such as `gcs_server (pid 7) died`.
            code: exit code of the program.
            saves: whether the step is saved, though no checkpoint is due.
        """
        if not self._asked_by:
            self.code, self._asked_by, self._saves = code, reason, saves

    def steps(self, first: int, last: int, *, settle: Callable[[], None]) -> Generator[int, None, None]:
        """Yields the steps to run. After a signal the present step is the last.

        Args:
            settle: waits until all saved files are on the disk. It may take any time.

        Raises:
            Stopped: the run was requested to end, and has saved if `begins_save` returned True.
        """
        self.outside_steps = BETWEEN_STEPS
        try:
            for step in range(first, last + 1):
                self.still_ours()
                self._step, self._in_time = step, False
                yield step
                if self._asked_by or step == last:
                    self._end_step()
                    settle()
                # Whoever asked without an error, in the last step, has what it asked for.
                if self._asked_by and not (step == last and self.code == 0):
                    done, after = ("saved", AGAIN) if self._saved == step else ("ended", AGAIN_FROM_LAST)
                    self._end(f"{self._asked_by}: {done} after step {step} of {last}; {after}")
        finally:
            self._step = None
            _set_alarm(0)

    def begins_save(self, step: int, *, due: bool) -> bool:
        """Returns whether `step` is saved now: because it is due, or because a request that wants it saved has made it
        the last one. The step has then ended in time, and saving may take any time."""
        if due or (self._asked_by and self._saves):
            self._end_step()
            self._saved = step
        return self._saved == step

    def _end_step(self) -> None:
        self._in_time = True
        _set_alarm(0)

    def _signalled(self, number: int, _: Any) -> None:
        name = NAMES[signal.Signals(number)]
        again, self.signalled = self.signalled, True
        self.code = self.code or 128 + number
        if self._raised and again:
            os._exit(self.code)
        self._asked_by = f"{self._asked_by}, then {name}" if self._asked_by else f"stopped by {name}"
        if again:
            self.at_once = True
            self._end(f"{self._asked_by}: ended at once; the same command resumes from the last checkpoint")
        if self._step is None:
            self._end(f"{self._asked_by} {self.outside_steps}")
        if self.patience_s <= 0:
            self._late()
        if self._in_time:
            what = f"{'is being saved' if self._saved == self._step else 'has ended'}, and the run then ends"
        else:
            then = "is then saved" if self._saves else "the run then ends"
            what = f"may take another checkpoint.on_signal_s={self.patience_s:g} s and {then}"
        # Not through sys.stderr, which the signal may have interrupted in the middle of a write.
        os.write(2, f"\n{name}: step {self._step} {what}; a second signal ends the run at once\n".encode())
        if not self._in_time:
            _set_alarm(self.patience_s)

    def _late(self, *_: Any) -> None:
        if self._step is not None and not self._in_time:
            self._end(
                f"{self._asked_by}: step {self._step} was not finished within "
                f"checkpoint.on_signal_s={self.patience_s:g} s and is lost; the same command resumes "
                "from the last checkpoint, if any"
            )

    def _end(self, sentence: str) -> None:
        self.sentence, self._raised = sentence, True
        _set_alarm(0)
        raise Stopped(sentence, self.code)


def _set_alarm(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
