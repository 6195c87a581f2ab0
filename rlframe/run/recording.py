"""Settings that a recording is made with. Imports no ray and no megatron."""

import json
from typing import Any

from rlframe.attempts.account.recording import Recording
from rlframe.models.tokenizer import fingerprint
from rlframe.run.config import RunConfig
from rlframe.types.tokenizer import PreTrainedTokenizerBase

SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "min_tokens", "stop")
"""Settings of the rollout that shape the groups."""
ENVIRONMENT = ("name", "options", "max_turns", "max_tokens", "on_limit", "on_failure")
"""Settings of the environment that do."""


def recording_of(config: RunConfig, *, run: str, tokenizer: PreTrainedTokenizerBase) -> Recording:
    """Returns what a run would record its groups with.

    Args:
        run: id of the run.
    """
    settings: dict[str, Any] = {
        "prompts_per_step": config.prompts_per_step,
        "algorithm.group_size": getattr(config.algorithm, "group_size", None),
        **{f"rollout.{name}": getattr(config.rollout, name) for name in SAMPLING},
        **{f"environment.{name}": getattr(config.environment, name) for name in ENVIRONMENT},
        "train.moe.router_replay": config.train.moe.router_replay,
    }
    # As it is read back.
    return Recording(run=run, settings=json.loads(json.dumps(settings)), tokenizer=fingerprint(tokenizer))
