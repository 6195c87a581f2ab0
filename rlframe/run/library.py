"""A run inside a program of one's own."""

from collections.abc import Sequence
from contextlib import closing

from rlframe.loops.callbacks import Callback, Callbacks
from rlframe.loops.stop import Stop, Stopped
from rlframe.run.check import check
from rlframe.run.compose.run import run as run_loop
from rlframe.run.config import RunConfig
from rlframe.run.folder import claim, dated
from rlframe.utils.bounds import shortened
from rlframe.utils.errors import ConfigError, RlframeError
from rlframe.utils.faults import Fault


def run(config: RunConfig, *, callbacks: Sequence[Callback] = ()) -> dict[str, float]:
    """Checks a configuration and does what it says, as the command line does: trains in the folder `config.output`,
    or goes on there from the last checkpoint; or evaluates, or generates (`mode`).

    Signals stay the caller's: Ctrl-C raises KeyboardInterrupt, and the next call goes on from the last checkpoint.

    What differs from the recipe goes into `overrides.yaml`, as the command line's overrides would.

    Args:
        config: of `rlframe.load`. It may be changed before, to what a file may say: `config.mode = "evaluate"`.
        callbacks: called between the parts of a training run.

    Returns:
        `after/...` of the last evaluation and `last_loss`, as far as there are any. Of a run that a callback has
        stopped, those so far.

    Raises:
        ConfigError: the configuration is wrong, or the folder belongs to another run.
        RlframeError: the run failed.
    """
    _refuse_others(callbacks)
    config = dated(check(config))
    with closing(claim(config)) as lock:
        stop = Stop(patience_s=config.checkpoint.on_signal_s, still_ours=lock.check)
        observers = Callbacks(callbacks, stop)
        try:
            return run_loop(config, stop, callbacks=observers)
        except Stopped as stopped:
            # By an alert, or because a process of Ray died.
            if stop.code == 1:
                raise RlframeError(str(stopped)) from None
            if not observers.asked:
                raise
            observers.on_end()
            return dict(observers.results)


def _refuse_others(callbacks: Sequence[Callback]) -> None:
    """Refuses what is no callback.

    Raises:
        ConfigError: a class, or an object of another class.
    """
    for each in callbacks:
        if not isinstance(each, Callback):
            hint = "give an instance: callbacks=[MyCallback()]" if isinstance(each, type) else ""
            rule = "must hold instances of classes derived from rlframe.Callback"
            raise ConfigError([Fault("callbacks", rule, got=shortened(each), hint=hint)])
