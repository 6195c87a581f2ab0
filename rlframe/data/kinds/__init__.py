"""One file per kind of data that offline algorithms train on. A file ends `STREAM = TheStream`; an algorithm's `data`
names it."""

import importlib
from typing import Any


def find_stream(kind: str) -> Any:
    """Returns the TrainingStream of the file `kind`. It is called with (DataConfig, tokenizer=, seed=, max_tokens=)."""
    return importlib.import_module(f"{__name__}.{kind}").STREAM
