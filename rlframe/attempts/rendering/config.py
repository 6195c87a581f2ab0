"""Settings of the renderer. Imports neither torch nor transformers."""

from dataclasses import dataclass
from enum import StrEnum

from rlframe.attempts.rendering import formats, reasoning
from rlframe.utils.errors import SettingError
from rlframe.utils.nearest import did_you_mean

AUTO = "auto"
NONE = "none"


class History(StrEnum):
    """Ways to go on where the chat template would write earlier turns differently than they were sampled."""

    APPEND = "append"
    """The next turn is appended to the tokens as they are. An attempt is one sequence, and keeps its reasoning."""
    FORK = "fork"
    """The conversation is rendered anew, as a served model would get it, and goes on as a further sequence."""


@dataclass(kw_only=True, slots=True)
class RenderingConfig:
    """Settings of how messages become tokens and sampled tokens become messages."""

    history: History = History.APPEND
    """Way to go on where the chat template would write earlier turns differently than they were sampled, for example
    without their reasoning. append: the next turn is appended to the tokens as they are. fork: the conversation is
    rendered anew, as a served model would get it, and a further sequence begins."""
    tool_calls: str = AUTO
    """Form of tool calls: a file of `rlframe/attempts/rendering/formats`, or none. auto tells it from the chat
    template, and refuses tools if it cannot."""
    reasoning: str = AUTO
    """Form of reasoning: think, brackets, gemma, harmony, or none, which leaves it in the content. auto tells it from
    the chat template."""

    def __post_init__(self) -> None:
        for field, known in (("tool_calls", formats.names()), ("reasoning", sorted(reasoning.STYLES))):
            value = getattr(self, field)
            if value not in (AUTO, NONE, *known):
                names = (AUTO, NONE, *known)
                near = did_you_mean(value, names)
                raise SettingError(field, f"must be one of {', '.join(names)}", got=value, hint=near)
