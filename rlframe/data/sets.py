"""Whole datasets of prompts: those that are evaluated, and those to which responses are written."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rlframe.data import builtin
from rlframe.data.config import DataConfig
from rlframe.data.prompts import joined, prompts_of
from rlframe.data.sources import Part, counted, understood
from rlframe.data.text.conversations import Conversation, understand
from rlframe.types.prompt import Prompt
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)


def settings_of(data: DataConfig, path: str | list[str] | dict[str, float], **keys: str | None) -> DataConfig:
    """Returns the settings with which another dataset is read as a whole.

    Args:
        keys: settings that replace those of `data`, unless they are None.
    """
    whole = DataConfig(path=path)
    given = {key: value for key, value in keys.items() if value is not None}
    return replace(
        data,
        path=path,
        evaluation_path=None,
        evaluation_count=whole.evaluation_count,
        streaming=False,
        shuffle_buffer=whole.shuffle_buffer,
        curriculum=None,
        **given,
    )


def read(config: DataConfig, *, part: builtin.Split, salt: str) -> list[Sequence[Conversation]]:
    """Returns the conversations of each dataset of `config.path`, in the order of its files.

    Args:
        part: records of built-in datasets.
        salt: decides which records a suffix `#500` keeps.

    Raises:
        DataError: a source is missing, empty or malformed.
    """
    entries = config.entries()
    found = []
    for entry in entries:
        namespace = entry.name if len(entries) > 1 else ""
        dropped: Counter[str] = Counter()
        own: Part[Conversation] = understood(entry.path, config, understand, dropped, namespace=namespace, part=part)
        if dropped:
            logger.info("%s: dropped %s", entry.path, dict(dropped))
        own = counted(own, entry, salt=salt)
        if not own:
            raise DataError(f"{entry.path}: expected records, found none")
        found.append(own.readings)
    return found


def read_prompts(
    config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, part: builtin.Split, salt: str
) -> tuple[Sequence[Prompt], list[str]]:
    """Returns the prompts of all datasets of `config.path`, and their ids. The arguments are those of `read`.

    Raises:
        DataError: as `read`, or no prompt is short enough.
    """
    conversations = read(config, part=part, salt=salt)
    made = joined([prompts_of(own, config, tokenizer=tokenizer) for own in conversations])
    kept = [place for place, length in enumerate(made.lengths) if length <= config.max_prompt_tokens]
    if too_long := len(made.ids) - len(kept):
        logger.warning(
            "%s: %d prompts of more than data.max_prompt_tokens=%d tokens are left out",
            config.what, too_long, config.max_prompt_tokens,
        )  # fmt: skip
    if not kept:
        raise DataError(
            f"{config.what}: expected prompts of at most data.max_prompt_tokens={config.max_prompt_tokens} tokens, "
            f"found none; the shortest has {min(made.lengths)}"
        )
    fitting = made.pick(kept)
    return fitting.prompts, fitting.ids
