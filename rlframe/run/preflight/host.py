"""The memory of a host that the ranks of a run take beside that of their devices."""

from dataclasses import dataclass
from functools import cached_property

from rlframe.algorithms.base import Algorithm
from rlframe.loops.config import Asynchronous
from rlframe.megatron.config.parallel import Parallel
from rlframe.run.config import RunConfig
from rlframe.run.preflight.engine import EngineMemory
from rlframe.run.preflight.trainer import FLOAT32, MOMENTS, TrainerMemory
from rlframe.weight_sync.config import HoldIn


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes that ranks pin or copy in the memory of one host."""

    run: RunConfig
    algorithm: Algorithm
    policy: TrainerMemory
    critic: TrainerMemory | None
    ranks: int
    """Most ranks of a role on a host."""
    engine: EngineMemory | None
    """A device of the engines that sample from the policy."""

    @cached_property
    def waiting_bytes(self) -> float:
        """References and published weights of the policy, weights of engines asleep, and of policy and critic inputs of
        layers, main weights and moments that wait there or are updated there."""
        # A reference that follows in more digits than the weights have a copy in float32 beside them.
        exact = self._following_bytes if self.policy.itemsize < FLOAT32 else 0.0
        references = (self.reference_bytes + exact) * self._on_host(self.policy)
        return (
            references
            + self.published_bytes
            + self.asleep_bytes
            + sum(_waiting_bytes(each) * self._on_host(each) for each in self._trainers)
        )

    @cached_property
    def checkpoint_copy_bytes(self) -> float:
        """A copy of the training state, which is written while training goes on."""
        if self.run.checkpoint.copies is Asynchronous.FALSE:
            return 0.0
        states = sum(
            max(each.state_bytes(stage) for stage in each.stages()) * self._on_host(each) for each in self._trainers
        )
        return states + self._following_bytes * self._on_host(self.policy)

    @cached_property
    def reference_bytes(self) -> float:
        """The reference's weights that a rank keeps, and exchanges with its own each step."""
        needed = self.algorithm.needs_reference and not self.algorithm.precomputes_reference
        if not needed:
            return 0.0
        with_adapters = self.run.train.lora is not None
        counts = (stage.saved if with_adapters else stage.all for stage in self.policy.stages())
        return max(counts) * self.policy.itemsize

    @property
    def published_bytes(self) -> float:
        """The weights that `weight_sync.hold=host` keeps for engines that come back: each once, because their ranks and
        engines are on one host."""
        if self.run.weight_sync.hold is HoldIn.NONE or self.engine is None:
            return 0.0
        (whole,) = self.policy.counter.stages(Parallel())
        return whole.all * self.policy.itemsize

    @property
    def asleep_bytes(self) -> float:
        """The weights that engines move there while others work (`rollout.sleep_level=1`)."""
        engine = self.engine
        if engine is None or not engine.sleeps or getattr(engine.config, "sleep_level", 0) != 1:
            return 0.0
        devices = min(engine.config.num_devices, self.ranks)
        return devices * engine.config.engines_per_device * (engine.weights_bytes + engine.drafter_bytes)

    @property
    def _following_bytes(self) -> float:
        """Returns the bytes of the float32 values of a rank's reference that follows the policy."""
        follows = self.algorithm.reference_update.every_steps > 0
        return self.reference_bytes / self.policy.itemsize * FLOAT32 if follows else 0.0

    @property
    def _trainers(self) -> list[TrainerMemory]:
        return [self.policy, *([self.critic] if self.critic else [])]

    def _on_host(self, trainer: TrainerMemory) -> int:
        """Returns the number of a role's ranks on a host."""
        return min(trainer.parallel.world, self.ranks)


def _waiting_bytes(trainer: TrainerMemory) -> float:
    """Returns the bytes of a rank's layer inputs, main weights and moments in host memory."""
    train, layout = trainer.train, trainer.parallel
    stage = max(trainer.stages(), key=lambda each: each.all)
    states = {part.name: part.bytes for part in trainer.states(stage)}
    found = float(trainer.host_activations())
    if train.offload_optimizer:
        found += states.get("main weights", 0.0) + states[MOMENTS]
    shard = stage.trained_dense / (layout.dp * layout.cp) + stage.trained_experts / layout.edp
    return found + shard * 12 * train.optimizer.cpu_offload_fraction
