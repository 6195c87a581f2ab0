"""Resumption: a loop with its first weights continues from the latest checkpoint, in a new program or with new
ranks."""

import pathlib
import time
from collections.abc import Sequence

from rlframe.loops.config import CheckpointConfig
from rlframe.loops.offline import OfflineLoop
from rlframe.loops.online import OnlineLoop
from rlframe.loops.reference import PrecomputedReference
from rlframe.loops.saving.checkpoints import CRITIC, TRAINING, Checkpoints, RunState, read_state
from rlframe.megatron.checkpoint.checksums import CHECKSUMS
from rlframe.megatron.driver.rank_group import RankGroup


def first_version(config: CheckpointConfig, latest: pathlib.Path | None) -> int:
    """Returns the version of the weights of `model.path`. Weights of `checkpoint.start_from` are published as version
    0, after those that prove the recordings."""
    return -1 if config.start_from is not None and latest is None else 0


class Resumption:
    """Runs the rest of a run, as often as its ranks must restart."""

    def __init__(
        self,
        config: CheckpointConfig,
        loop: OnlineLoop | OfflineLoop,
        checkpoints: Checkpoints,
        groups: Sequence[RankGroup],
    ):
        """Args: loop: loop that has used no data yet, and whose ranks have the first weights. groups: the groups of
        ranks of trained models, and of frozen models with ranks of their own."""
        self.config, self.loop, self.checkpoints, self.groups = config, loop, checkpoints, groups
        self.online = loop if isinstance(loop, OnlineLoop) else None
        self.critic = self.online.critic if self.online else None
        self.stream = loop.prompts if isinstance(loop, OnlineLoop) else loop.examples
        self.latest = checkpoints.latest()
        self.beginning = RunState(
            step=0,
            num_optimizer_steps=0,
            data=self.stream.state(),
            results={},
            algorithm=self.online.algorithm.state() if self.online else {},
        )
        self.ready_at = 0.0
        """Time at which the first step could begin."""

    def finish(self) -> None:
        """Runs the rest of the run. The ranks must have the first weights, and the loop must be at its beginning."""
        done_steps = self.resume()
        self.ready_at = self.ready_at or time.monotonic()
        self.loop.run(done_steps)
        if self.loop.config.checkpoint.export:
            self.loop.export("model")

    def start_anew(self) -> str:
        """Restarts the ranks of the trained models, and those of frozen ones that died, and resets the loop to its
        beginning. Returns where `finish` will continue."""
        loop = self.loop
        loop.metrics.num_restarts += 1
        trained = [loop.policy, self.critic] if self.critic else [loop.policy]
        with loop.phase("restart"):
            self.checkpoints.abandon()
            loop.phase.begin_anew(*trained)
            for group in self.groups:
                if group in trained or group.workers.deaths():
                    group.restart()
            self.latest = self.checkpoints.latest()
            if self.online:
                self.online.weight_sync.reattach(version=first_version(self.config, self.latest))
        self.stream.restore(self.beginning.data)
        if self.online:
            self.online.algorithm.restore(self.beginning.algorithm)
        loop.results.clear()
        loop.metrics.rewind(read_state(self.latest).step if self.latest else None)
        return f"{self.latest}" if self.latest else "the start (there is no complete checkpoint)"

    def resume(self) -> int:
        """Restores the latest complete checkpoint and returns the number of steps done."""
        loop, latest = self.loop, self.latest
        self._start_from()
        if isinstance(loop, OfflineLoop) and isinstance(loop.model, PrecomputedReference):
            # The policy has the first weights now, but not any more after a checkpoint is loaded.
            loop.model.fill(loop.examples, say=loop.metrics.say)
        if latest is None:
            return 0
        state = read_state(latest)
        if self.config.verify:
            loop.policy.verify(latest / TRAINING)
            if self.critic:
                self.critic.verify(latest / CRITIC)
        self.stream.restore(state.data)
        loop.results |= state.results
        loop.policy.load(latest / TRAINING, num_optimizer_steps=state.num_optimizer_steps)
        if self.critic:
            self.critic.load(latest / CRITIC, num_optimizer_steps=state.num_critic_optimizer_steps)
        if self.online:
            self.online.algorithm.restore(state.algorithm)
            self.online.weight_sync.publish(version=state.step)
        loop.metrics.say(f"resumed after step {state.step} from {latest}")
        return state.step

    def _start_from(self) -> None:
        """Loads the weights of `checkpoint.start_from`, if it is set. A resumed run needs them for its reference
        only."""
        loop, config = self.loop, self.config
        keeps_first_weights = loop.algorithm.needs_reference or loop.algorithm.precomputes_reference
        if config.start_from is None or (self.latest and not keeps_first_weights):
            return
        folder = pathlib.Path(config.start_from).expanduser()
        # Only checkpoints written by rlframe have checksums.
        if config.verify and (folder / CHECKSUMS).exists():
            loop.policy.verify(folder)
        loop.policy.load_weights(folder)
        if self.online and self.latest is None:
            self.online.weight_sync.publish(version=0)
        loop.metrics.say(f"weights from {folder}")
