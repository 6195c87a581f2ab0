"""Tokens and operations that a device gets done in each phase of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

FORWARD, TRAINING = 1, 3
"""Passes of a phase, in forward passes: a backward pass counts as two."""
PHASES = {
    "train": ("policy", TRAINING),
    "old_logprobs": ("policy", FORWARD),
    "reference": ("policy", FORWARD),
    "critic": ("critic", TRAINING),
    "values": ("critic", FORWARD),
}
"""Role and passes of each phase that computes every token of the step's sequences."""
ROLLOUT = "rollout"
NOTHING_SPARED = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The devices of a role, and the operations of its model."""

    devices: int
    operations: Callable[[float, float], float]
    """Returns the floating-point operations of a token's forward pass, given the number of tokens of its sequence, in
    the mean over tokens, which is the sum of the squares of the sequences' tokens over their sum; and the share of
    tokens that the loss counts, whose logits are computed."""
    training: Callable[[float, float], float] | None = None
    """Returns the same of a pass of training, if it computes more: the head for multi-token prediction."""
    epochs: int = 1
    """Number of times that a batch is trained on."""


@dataclass(kw_only=True, slots=True)
class Throughput:
    """Measures phases by tokens a second and device, and by the share of the device's peak (MFU)."""

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """By role: policy, critic, and rollout for the engines."""
    peak: float | None = None
    """Operations a second of a device. None if it is not known: no MFU is claimed then."""
    samples_ahead: bool = False
    """Whether engines sample during the whole step, not in the phase `rollout` only."""

    def of_training(
        self,
        times: Mapping[str, float],
        lengths: Int[np.ndarray, " R"],
        predicted: int,
        *,
        spared: Mapping[str, Int[np.ndarray, " N"]] | None = None,
    ) -> dict[str, float]:
        """Returns `throughput/PHASE_...` of the phases that compute every token.

        Args:
            times: the step's `time/PHASE_s`.
            lengths: tokens of each sequence, prompt included.
            predicted: tokens of all sequences that the loss counts.
            spared: by role, numbers of first tokens of sequences that are computed for others already. They are tokens
                of the phase, and cost no operations.
        """
        found: dict[str, float] = {}
        for phase, (role, passes) in PHASES.items():
            if (seconds := times.get(f"time/{phase}_s")) and (shape := self.shapes.get(role)):
                others = (spared or {}).get(role, NOTHING_SPARED)
                own = int(lengths.sum()) - int(others.sum())
                # A token that follows spared ones sees them, too.
                mean = (_squares(lengths) - _squares(others)) / own
                epochs = shape.epochs if passes == TRAINING else 1
                of_token = (passes == TRAINING and shape.training) or shape.operations
                operations = epochs * own * passes * of_token(mean, predicted / own)
                found |= self._rates(phase, shape, epochs * int(lengths.sum()), seconds, operations)
        return found

    def of_sampling(
        self,
        times: Mapping[str, float],
        lengths: Int[np.ndarray, " R"],
        sampled: Int[np.ndarray, " R"],
        *,
        untrained: Sequence[tuple[int, int]] = (),
    ) -> dict[str, float]:
        """Returns `throughput/rollout_...` of the tokens that were sampled. Prompts are left out, which caches may
        spare.

        Args:
            sampled: tokens of each sequence that the policy sampled.
            untrained: lengths and sampled tokens of further sequences, which took their part of the time.
        """
        further = np.array(untrained, dtype=np.int64).reshape(-1, 2)
        lengths, sampled = np.append(lengths, further[:, 0]), np.append(sampled, further[:, 1])
        seconds = times.get("time/step_s" if self.samples_ahead else "time/rollout_s")
        shape = self.shapes.get(ROLLOUT)
        if not seconds or shape is None or not sampled.any():
            return {}
        # The last token of a sequence sees all others, the first sampled one the prompt: half their sum in the mean,
        # and an operation count that is given a length expects half of that.
        mean = float((sampled * (2.0 * lengths - sampled)).sum() / sampled.sum())
        tokens = int(sampled.sum())
        return self._rates(ROLLOUT, shape, tokens, seconds, tokens * shape.operations(mean, 1.0))

    def _rates(self, phase: str, shape: Shape, tokens: int, seconds: float, operations: float) -> dict[str, float]:
        """Returns the metrics of a phase.

        Args:
            operations: of all tokens.
        """
        found = {f"throughput/{phase}_tokens_per_s_device": tokens / seconds / shape.devices}
        if self.peak:
            found[f"throughput/{phase}_mfu_fraction"] = operations / seconds / shape.devices / self.peak
        return found


def _squares(tokens: Int[np.ndarray, " R"]) -> float:
    """Returns the sum of squares."""
    return float((tokens.astype(np.float64) ** 2).sum())
