"""Settings of curricula. Imports neither torch nor transformers."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError


class By(StrEnum):
    """Properties of prompts that decide their order."""

    FIELD = "field"
    """A number in the record."""
    STAGE = "stage"
    """The name of a stage in the record. Each stage begins at a step."""
    PASS_RATE = "pass_rate"
    """The measured share of right answers."""


@dataclass(kw_only=True, slots=True)
class CurriculumConfig:
    """Settings of the order of prompts."""

    by: By
    """Property that decides the order. field: within each epoch by a number of the record. stage: records name a stage,
    and only those of the present stage are dealt, each stage with epochs of its own. pass_rate: within each epoch after
    the first by what the attempts of the prompt before were worth."""
    field: str | None = None
    """Field of the record with the number, or with the name of the stage."""
    descending: bool = False
    """Whether the greatest number of the field comes first."""
    stages: Annotated[dict[str, int] | None, Range(1, 10**9, note="the first step of a stage")] = None
    """First step of each stage, by its name. The first stage begins at step 1."""
    reward_part: str | None = None
    """Name in reward.parts of the reward whose mean over a group, each taken as between 0 and 1, is the pass rate. null
    means the weighted sum."""
    target: Annotated[float, Range(0, 1)] | None = None
    """Pass rate whose prompts come first, then those the nearer to it. Prompts without a pass rate come first of all.
    null keeps the random order."""
    lowest: Annotated[float, Range(0, 1)] = 0.0
    """Pass rate below which a prompt is passed over for an epoch, and attempted again in the one after."""
    highest: Annotated[float, Range(0, 1)] = 1.0
    """Pass rate above which a prompt is passed over for an epoch, and attempted again in the one after."""

    def __post_init__(self) -> None:
        check_bounds(self)
        used = {
            By.FIELD: {"field", "descending"},
            By.STAGE: {"field", "stages"},
            By.PASS_RATE: {"reward_part", "target", "lowest", "highest"},
        }[self.by]
        given = {
            "field": self.field is not None,
            "descending": self.descending,
            "stages": self.stages is not None,
            "reward_part": self.reward_part is not None,
            "target": self.target is not None,
            "lowest": self.lowest != 0.0,
            "highest": self.highest != 1.0,
        }
        for name, is_given in given.items():
            if is_given and name not in used:
                got = getattr(self, name)
                raise SettingError(name, f"has no effect with by={self.by}", got=got, hint="remove it")
        if "field" in used and not self.field:
            raise SettingError("field", f"must name a field of the records with by={self.by}", got=self.field or "none")
        if self.by is By.STAGE:
            self._check_stages()
        if self.lowest >= self.highest:
            raise SettingError("lowest", f"must be below highest={self.highest:g}", got=self.lowest)
        if self.by is By.PASS_RATE and self.target is None and (self.lowest, self.highest) == (0.0, 1.0):
            raise SettingError("by", "needs a target, or lowest or highest, with pass_rate", got="none of them")

    def _check_stages(self) -> None:
        firsts = list((self.stages or {}).values())
        if not firsts or min(firsts) != 1 or len(set(firsts)) < len(firsts):
            raise SettingError(
                "stages",
                "must give each stage a first step of its own, and one of them step 1",
                got=self.stages or "none",
            )
