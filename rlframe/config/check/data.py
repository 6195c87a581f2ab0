"""Rules of the data that depend on the algorithm: which settings its kind of data looks at."""

from collections.abc import Iterator
from dataclasses import fields
from typing import TypeGuard

from rlframe.algorithms.base import Algorithm, OfflineAlgorithm
from rlframe.data.config import DataConfig
from rlframe.data.conversations import understand
from rlframe.data.kinds import find_stream
from rlframe.data.prompts import PromptStream
from rlframe.data.sources import load
from rlframe.data.streaming import check_beginning

OFFLINE = frozenset({"cache_folder", "cache_gb", "streaming", "shuffle_buffer"})
"""Fields of DataConfig that every kind of offline data looks at."""
OF_SOME_KINDS = (
    "prompt_key",
    "answer_key",
    "system_prompt",
    "last_turn_only",
    "text_layout",
    "labels",
    "max_prompt_tokens",
    "cache_folder",
    "cache_gb",
    "streaming",
    "shuffle_buffer",
)
"""Fields of DataConfig that not every kind of data looks at."""


def setting_faults(data: DataConfig, algorithm: Algorithm, *, name: str) -> Iterator[str]:
    """Settings that the algorithm's kind of data does not look at."""
    used, what = set(PromptStream.settings if algorithm.online else OFFLINE), ""
    if learns_from_responses(algorithm):
        used |= find_stream(algorithm.data).settings
        what = f", which trains on {algorithm.data}"
    defaults = {field.name: field.default for field in fields(DataConfig)}
    for key in OF_SOME_KINDS:
        value = getattr(data, key)
        if key not in used and value != defaults[key]:
            text = str(value).lower() if isinstance(value, bool) else value
            yield f"data.{key} has no effect with algorithm.name={name}{what}, got {text}; remove it"
    if data.streaming and algorithm.precomputes_reference:
        yield (
            "algorithm.reference must be live with data.streaming=true, got precomputed: not all data is known before "
            "training"
        )


def read_all(data: DataConfig, algorithm: Algorithm, *, seed: int) -> None:
    """Reads the whole dataset as the run will, or the beginning of a streamed one. Raises DataError."""
    kind = find_stream(algorithm.data).understand if learns_from_responses(algorithm) else understand
    if data.streaming:
        check_beginning(data, kind)
    else:
        load(data, seed=seed, understand=kind)


def learns_from_responses(algorithm: Algorithm) -> TypeGuard[OfflineAlgorithm]:
    """Whether the data's own responses are trained on, in some steps at least."""
    return isinstance(algorithm, OfflineAlgorithm) and algorithm.needs_responses
