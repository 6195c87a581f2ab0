"""Tasks of the package `reasoning-gym`, made on the way: `reasoning_gym:NAME`, or with settings of its data set
`reasoning_gym:NAME?size=5000&seed=1&max_terms=3`. No file, no download.

The reward `reasoning_gym` scores responses by the task's own verifier.
"""

import json
import math
from typing import Any
from urllib.parse import parse_qsl

from rlframe.data.builtin.arithmetic import Split
from rlframe.data.records import Record
from rlframe.utils.errors import DataError

PREFIX = "reasoning_gym:"
SIZE, SEED = 10_000, 0
"""Size of the part to train on and its seed, unless they are given."""
HELD_OUT_SEED = 1_000_003
"""Distance of the seed of the part that is held out."""
FIELD = "reasoning_gym"
"""Field of a record that the reward needs."""


def records(path: str, split: Split) -> list[Record]:
    """Returns the tasks of one part. A tenth as many are held out, made with another seed; tasks that are in both parts
    are not trained on.

    Raises:
        DataError: the package is not installed, has no such data set, or refuses its settings.
    """
    name, settings = parsed(path)
    size, seed = whole_number(path, settings, "size", SIZE, least=1), whole_number(path, settings, "seed", SEED)
    if split is Split.HELD_OUT:
        size, seed = max(1, size // 10), seed + HELD_OUT_SEED
    made = dataset(path, name, size=size, seed=seed, **settings)
    return [
        Record(
            fields={
                "id": f"{name}:{seed}:{index}",
                "prompt": str(entry["question"]),
                "answer": "" if entry["answer"] is None else str(entry["answer"]),
                FIELD: {"name": name, "entry": entry},
            },
            source=name,
            where=f"{path} task {index}",
        )
        for index, entry in enumerate(made)
    ]


def parsed(path: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of the data set, and its settings.

    Example:
        >>> parsed("reasoning_gym:chain_sum?max_terms=2&size=100")
        ('chain_sum', {'max_terms': 2, 'size': 100})
    """
    name, _, query = path.removeprefix(PREFIX).partition("?")
    return name, {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}


def whole_number(path: str, settings: dict[str, Any], name: str, default: int, *, least: float = -math.inf) -> int:
    """Removes a setting and returns it.

    Raises:
        DataError: it is no whole number, or below `least`.
    """
    value = settings.pop(name, default)
    if type(value) is not int or value < least:
        bound = f" of at least {least}" if math.isfinite(least) else ""
        raise DataError(f"{path}: {name} must be a whole number{bound}, got {value!r:.60}")
    return value


def dataset(path: str, name: str, **settings: Any) -> Any:
    """Returns a data set of the package.

    Raises:
        DataError: see `records`.
    """
    try:
        # Optional: the extra `agents`.
        import reasoning_gym
    except ImportError as error:
        raise DataError(f"{path}: install the package reasoning-gym: pip install 'rlframe[agents]'") from error
    known = sorted(reasoning_gym.factory.DATASETS)
    if name not in known:
        raise DataError(f"{path}: reasoning-gym has no data set {name!r}; it has {', '.join(known)}")
    try:
        return reasoning_gym.create_dataset(name, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{path}: reasoning-gym refuses the settings of {name}: {error}") from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
