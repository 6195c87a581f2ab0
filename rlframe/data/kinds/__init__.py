"""One file per kind of data that offline algorithms train on. A file ends `SOURCE = TheSource`; an algorithm's `data`
names it."""

import importlib
from typing import Any


def find_source(kind: str) -> Any:
    """Returns the TrainingSource of the file `kind`. It is called with (DataConfig, tokenizer=, seed=, max_tokens=)."""
    return importlib.import_module(f"{__name__}.{kind}").SOURCE
