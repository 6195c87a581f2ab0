"""Keys and values that the engine computed for another request."""

from collections.abc import Mapping
from typing import Any

from rlframe.rollout.served.config import ServedConfig
from rlframe.tools.explain_gap.rung import Rung, Subject


class PrefixCache(Rung):
    """Turns the engine's prefix cache off."""

    place = 50
    name = "prefix_cache"
    question = "Does the engine read keys and values of other requests?"
    remedy = "rollout.enable_prefix_caching=false"
    cost = "each response of a group prefills its prompt"
    redraws = True

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        rollout = subject.run.rollout
        if not isinstance(rollout, ServedConfig):
            return f"rollout.name={subject.engine} has no prefix cache"
        return "" if rollout.enable_prefix_caching else "rollout.enable_prefix_caching=false already"

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """See Rung."""
        return {"rollout.enable_prefix_caching": False}


RUNG = PrefixCache()
