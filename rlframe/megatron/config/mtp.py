"""Settings of the head for multi-token prediction. Imports neither torch nor megatron."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError


class MtpMode(StrEnum):
    """Uses of the head for multi-token prediction that a checkpoint has."""

    DROP = "drop"
    """It is not loaded, and missing from exports and weight sync."""
    KEEP = "keep"
    """It stays as loaded, and is exported and synced."""
    TRAIN = "train"
    """It is trained beside the algorithm's loss, exported and synced."""


@dataclass(kw_only=True, slots=True)
class MtpConfig:
    """Settings of the head with which some checkpoints predict the token after the next (DeepSeek-V3, arXiv 2412.19437,
    section 2.2). Engines draft with it in speculative decoding."""

    mode: MtpMode = MtpMode.DROP
    """Use of the head."""
    loss_scaling_factor: Annotated[float, Range(above=0, maximum=1000)] = 0.1
    """For train: weight of its loss, the mean cross entropy over the trained tokens of an optimizer step."""
    detach: bool = True
    """For train: whether its loss trains the head alone. Otherwise the gradient also reaches the layers below, the
    embedding and the output layer, so that the policy is trained towards likely text too."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.mode is MtpMode.TRAIN:
            return
        for name, default in (("loss_scaling_factor", 0.1), ("detach", True)):
            if (value := getattr(self, name)) != default:
                raise SettingError(name, f"has no effect with mode={self.mode}", got=value, hint="remove it")

    @property
    def keeps(self) -> bool:
        """Returns whether the head is part of the model."""
        return self.mode is not MtpMode.DROP

    @property
    def trains(self) -> bool:
        """Returns whether the head is trained."""
        return self.mode is MtpMode.TRAIN


def in_head(parameter: str) -> bool:
    """Returns whether a Megatron parameter belongs to the head."""
    return ".mtp_head." in f".{parameter}"
