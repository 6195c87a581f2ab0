"""Settings of speculative decoding, which all engines share. Imports neither torch nor an engine."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import SettingError


class SpeculativeMethod(StrEnum):
    """Source of drafts."""

    NGRAM = "ngram"
    """Tokens that followed the last ones where these occurred before in the same sequence. Needs no weights."""
    DRAFT_MODEL = "draft_model"
    """A smaller model with the same vocabulary. Its weights stay as they are while the policy learns."""
    MTP = "mtp"
    """The multi-token prediction heads of the checkpoint. With train.mtp.mode=keep or train every weight sync brings
    them, otherwise they stay as they are; the embedding and the output layer are the policy's."""


@dataclass(kw_only=True, slots=True)
class SpeculativeConfig:
    """Settings of speculative decoding: several tokens are drafted at little cost, the policy checks them in one pass,
    and those that it would have sampled are kept (arXiv 2211.17192). The distribution of responses stays that of the
    policy."""

    method: SpeculativeMethod = SpeculativeMethod.NGRAM
    """Source of drafts. ngram: what followed the last tokens where they occurred before in the sequence.
    draft_model: a smaller model, which does not follow the policy. mtp: the heads for multi-token prediction of the
    model's own checkpoint, which follow it with train.mtp.mode=train."""
    num_tokens: Annotated[int, Range(1, 64)] = 4
    """Number of tokens drafted at once. A step yields 1 to num_tokens + 1 tokens of a response."""
    model: Annotated[str | None, PathText()] = None
    """Folder or hub id of the draft model, in Hugging Face format, with the policy's tokenizer. With
    method=draft_model."""
    min_match_tokens: Annotated[int, Range(1, 64)] = 2
    """Least number of last tokens that must have occurred before. With method=ngram."""
    max_match_tokens: Annotated[int, Range(1, 64)] = 4
    """Greatest number of last tokens that are looked for, before fewer are. With method=ngram."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.method is SpeculativeMethod.DRAFT_MODEL and not self.model:
            raise SettingError("model", "must name the draft model with method=draft_model", got="nothing")
        if self.method is not SpeculativeMethod.DRAFT_MODEL and self.model is not None:
            raise SettingError("model", f"has no effect with method={self.method}", got=self.model, hint="remove it")
        if self.method is not SpeculativeMethod.NGRAM:
            for name, default in (("min_match_tokens", 2), ("max_match_tokens", 4)):
                if (value := getattr(self, name)) != default:
                    raise SettingError(name, f"has no effect with method={self.method}", got=value, hint="remove it")
        if self.min_match_tokens > self.max_match_tokens:
            raise SettingError(
                "min_match_tokens",
                f"must not exceed max_match_tokens={self.max_match_tokens}",
                got=self.min_match_tokens,
            )

    @property
    def has_weights(self) -> bool:
        """Returns whether drafts come from weights of their own."""
        return self.method is not SpeculativeMethod.NGRAM


@dataclass(frozen=True, slots=True)
class Drafts:
    """Counts of the drafts of an engine since it started."""

    num_checks: int = 0
    """Checks of a draft: one for each step of the model and response that had one."""
    num_tokens: int = 0
    """Tokens drafted."""
    num_accepted: int = 0
    """Drafted tokens that the policy sampled too."""

    def __add__(self, other: "Drafts") -> "Drafts":
        return Drafts(
            self.num_checks + other.num_checks,
            self.num_tokens + other.num_tokens,
            self.num_accepted + other.num_accepted,
        )

    def __sub__(self, other: "Drafts") -> "Drafts":
        return Drafts(
            self.num_checks - other.num_checks,
            self.num_tokens - other.num_tokens,
            self.num_accepted - other.num_accepted,
        )

    def metrics(self) -> dict[str, float]:
        """Returns the metrics. None without drafts."""
        if not self.num_tokens:
            return {}
        return {
            "rollout/draft_accepted_fraction": self.num_accepted / self.num_tokens,
            "rollout/draft_accepted_tokens_mean": self.num_accepted / self.num_checks,
        }
