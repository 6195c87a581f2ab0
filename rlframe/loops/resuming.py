"""Resumption: a loop with its first weights continues from the latest checkpoint, in a new program or with new
ranks."""

import pathlib
import time
from collections.abc import Sequence

from rlframe.loops.base import Loop
from rlframe.loops.config import CheckpointConfig
from rlframe.loops.saving import first_weights
from rlframe.loops.saving.checkpoints import TRAINING, Checkpoints, RunState, read_state
from rlframe.megatron.checkpoint.checksums import CHECKSUMS
from rlframe.megatron.driver.rank_group import RankGroup
from rlframe.utils.errors import CheckpointError

OTHER_WEIGHTS = (
    "{where} holds other weights than when this run began, and {what} is in no checkpoint: bring them back "
    "(of a model of the hub by its revision), or begin a new run with output=ANOTHER"
)


def first_version(config: CheckpointConfig, latest: pathlib.Path | None) -> int:
    """Returns the version of the weights of `model.path`. Weights of `checkpoint.start_from` are published as version
    0, after those that prove the recordings."""
    return -1 if config.start_from is not None and latest is None else 0


class Resumption:
    """Runs the rest of a run, as often as its ranks must restart."""

    def __init__(self, config: CheckpointConfig, loop: Loop, checkpoints: Checkpoints, groups: Sequence[RankGroup]):
        """
        Args:
            loop: which has dealt no data yet, and whose ranks have the first weights.
            groups: the ranks of every model that is trained, and of the frozen ones that have ranks of their own.
        """
        self.config, self.loop, self.checkpoints, self.groups = config, loop, checkpoints, groups
        self.latest = checkpoints.latest()
        self.beginning = RunState(
            step=0, num_optimizer_steps=0, data=loop.source.state(), results={}, algorithm=loop.algorithm_state()
        )
        loop.first_weights, loop.auxiliary_first_weights = self._identity(), self._auxiliary_identities()
        self.ready_at = 0.0
        """Time at which the first step could begin."""

    def finish(self) -> None:
        """Runs the rest of the run. The ranks must have the first weights, and the loop must be at its beginning."""
        self.loop.prepare_checkpoints()
        done_steps = self.resume()
        self.ready_at = self.ready_at or time.monotonic()
        self.loop.run(done_steps)
        if self.config.export:
            self.loop.export("model")

    def start_anew(self) -> str:
        """Restarts the ranks of the trained models, and those of frozen ones that died, and resets the loop to its
        beginning. Returns where `finish` will continue."""
        loop = self.loop
        loop.metrics.num_restarts += 1
        trained = loop.trained
        with loop.phase("restart"):
            loop.forget()
            self.checkpoints.abandon()
            loop.phase.begin_anew(*trained)
            for group in self.groups:
                if group in trained or group.workers.deaths():
                    group.restart()
            self.latest = self.checkpoints.latest()
            loop.reattach(first_version(self.config, self.latest))
        loop.source.restore(self.beginning.data)
        loop.restore_algorithm(self.beginning.algorithm)
        loop.results.clear()
        loop.rewind(read_state(self.latest).step if self.latest else None)
        return f"{self.latest}" if self.latest else "the start (there is no complete checkpoint)"

    def resume(self) -> int:
        """Restores the latest complete checkpoint and returns the number of steps done."""
        loop, latest = self.loop, self.latest
        state = read_state(latest) if latest else self.beginning
        self._require_first_weights(state.first_weights or loop.first_weights)
        self._require_auxiliary_first_weights(loop.auxiliary_first_weights | state.auxiliary_first_weights)
        self._start_from()
        # The policy has the first weights now, but not any more after a checkpoint is loaded.
        loop.prepare()
        if latest is None:
            return 0
        if self.config.verify:
            loop.policy.verify(latest / TRAINING)
            for role, model in loop.auxiliary.items():
                model.verify(latest / role)
        loop.source.restore(state.data)
        loop.results |= state.results
        loop.policy.load(latest / TRAINING, num_optimizer_steps=state.num_optimizer_steps)
        for role, model in loop.auxiliary.items():
            model.load(latest / role, num_optimizer_steps=state.num_auxiliary_optimizer_steps[role])
        loop.restore_algorithm(state.algorithm)
        loop.publish(state.step)
        loop.go_on(latest)
        loop.metrics.print_line(f"resumed after step {state.step} from {latest}")
        return state.step

    def _start_from(self) -> None:
        """Loads the weights of `checkpoint.start_from`, if it is set. A resumed run needs them for its reference, and
        as the base of adapters, which is in no checkpoint."""
        loop, config = self.loop, self.config
        if config.start_from is None or (self.latest and not self._keeps_first_weights):
            return
        folder = pathlib.Path(config.start_from).expanduser()
        # Only checkpoints written by rlframe have checksums.
        if config.verify and (folder / CHECKSUMS).exists():
            loop.policy.verify(folder)
        loop.policy.load_weights(folder)
        if self.latest is None:
            loop.publish(0)
        loop.metrics.print_line(f"weights from {folder}")

    @property
    def _keeps_first_weights(self) -> bool:
        """Returns whether a resumed run still needs the weights with which it began."""
        algorithm, lora = self.loop.algorithm, self.loop.policy.setup.train.lora
        return algorithm.needs_reference or algorithm.precomputes_reference or lora is not None

    def _identity(self) -> str:
        """Returns the identity of the weights with which a run would begin now. Empty if none needs it."""
        if not self._keeps_first_weights:
            return ""
        return first_weights.identity(self.loop.policy.setup.model, self.config.start_from)

    def _auxiliary_identities(self) -> dict[str, str]:
        """Returns the identities of the bases of adapters of further models, by role."""
        return {
            role: first_weights.identity(model.setup.model, None)
            for role, model in self.loop.auxiliary.items()
            if model.setup.train.lora is not None
        }

    def _require_first_weights(self, expected: str) -> None:
        """Raises CheckpointError if a run would go on with other first weights than those that it began with, and needs
        them."""
        found = self._identity()
        if not expected or not found or found == expected:
            return
        what = "the base of its adapters" if self.loop.policy.setup.train.lora else "its reference"
        path, start_from = self.loop.policy.setup.model.path, self.config.start_from
        where = (
            f"model.path={path}" if start_from is None else f"model.path={path} or checkpoint.start_from={start_from}"
        )
        raise CheckpointError(OTHER_WEIGHTS.format(where=where, what=what))

    def _require_auxiliary_first_weights(self, expected: dict[str, str]) -> None:
        """Raises CheckpointError if the adapters of a further model would go on with another base."""
        for role, found in self._auxiliary_identities().items():
            if expected.get(role, found) != found:
                where = f"the {role}'s model {self.loop.auxiliary[role].setup.model.path}"
                raise CheckpointError(OTHER_WEIGHTS.format(where=where, what="the base of its adapters"))
