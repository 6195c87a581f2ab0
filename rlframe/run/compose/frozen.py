"""Composes what samples without training: engines that load the model themselves, and the rewards."""

from dataclasses import dataclass

from rlframe.attempts.fleet import Attempts
from rlframe.loops.phases import Phases
from rlframe.loops.sampling.scoring import Scorer
from rlframe.run.compose import models
from rlframe.run.compose.parts import Parts
from rlframe.utils.process import garbage


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """Engines of a model that is not trained, started, and what judges their responses."""

    attempts: Attempts
    scorer: Scorer | None


def frozen(parts: Parts, *, rewarded: bool) -> Frozen:
    """Returns engines that hold the model of the configuration.

    Args:
        rewarded: whether responses are judged.
    """
    placement = parts.devices()
    # The processes first, so that all of them start at the same time.
    engines = models.frozen(parts, placement)
    attempts = models.attempts(parts, engines, rewarded=rewarded)
    engines.start()
    # Every role has devices of its own.
    phase = Phases(sharing=[], announce=lambda name: None)
    scorer = models.scorer(parts, placement, phase) if rewarded else None
    parts.start_up.done("processes")
    garbage.release()
    parts.start_up.over()
    return Frozen(attempts=attempts, scorer=scorer)
