"""RL post-training of language models, from a laptop to a cluster.

config = rlframe.load("grpo_qwen3_moe", ["steps=100"])
rlframe.check(config)
results = rlframe.run(config, callbacks=[MyCallback()])
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Alert", "Callback", "ConfigError", "RlframeError", "RunConfig", "check", "load", "run"]

_HOMES = {
    "Alert": "rlframe.loops.alerts.base",
    "Callback": "rlframe.loops.callbacks",
    "ConfigError": "rlframe.utils.errors",
    "RlframeError": "rlframe.utils.errors",
    "RunConfig": "rlframe.run.config",
    "check": "rlframe.run.check",
    "load": "rlframe.run.load",
}
"""Modules of the public names, whose types are in `__init__.pyi`. They are imported when a name is used first, because
some of them import torch."""


def __getattr__(name: str) -> Any:
    if name == "run":
        # The package, which can be called.
        return importlib.import_module("rlframe.run")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rlframe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
