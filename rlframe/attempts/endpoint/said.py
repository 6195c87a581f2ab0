"""Responses of the policy as agents are told of them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidCall:
    """A call of a tool."""

    id: str
    """Unique among the calls of an attempt."""
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A response of the policy."""

    id: str
    """Unique among the responses of an attempt."""
    model: str
    """The name that the agent calls the policy."""
    created: int
    """Seconds since 1970."""
    content: str
    reasoning: str
    """Empty if there is none."""
    calls: tuple[SaidCall, ...]
    is_cut_off: bool
    """Whether it has reached a limit of tokens."""
    prompt_tokens: int
    sampled_tokens: int

    @property
    def finish_reason(self) -> str:
        """The reason for which it ended, as the API names it."""
        return "length" if self.is_cut_off else "tool_calls" if self.calls else "stop"
