"""Settings of the data. Light: imports neither torch nor transformers."""

import re
from dataclasses import dataclass

COUNT_SUFFIX = re.compile(r"(.+)#(\d+)")


def split_count(path: str) -> tuple[str, int | None]:
    """`name#500` as ("name", 500); a path without a count as (path, None)."""
    match = COUNT_SUFFIX.fullmatch(path)
    return (match[1], int(match[2])) if match else (path, None)


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Which records a run reads and which of them it holds out."""

    path: str = "arithmetic"
    """The built-in `arithmetic` or `arithmetic_homework`, a .jsonl, .json or .parquet file, a folder of such files, or
    a Hugging Face dataset `owner/name[:subset[:split]]`. A suffix `#500` trains on 500 records, chosen by the run's
    seed."""
    evaluation_path: str | None = None
    """Held-out records, in the same forms as `path`. When null, `evaluation_count` records of `path` are held out, but
    at most a tenth of it, chosen by a hash of their ids: the same ones for every seed."""
    evaluation_count: int = 256
    """Held-out prompts an evaluation attempts, at most; chosen by a hash of their ids. 0 holds out nothing."""
    prompt_key: str | None = None
    """Field with the prompt: text or a list of {role, content}. When null, known shapes of records are recognised."""
    answer_key: str | None = None
    """Field with the answer. When null, known shapes of records are recognised."""
    system_prompt: str | None = None
    """System message for conversations that have none of their own."""
    max_prompt_tokens: int = 1024
    """A prompt with more tokens than this is dropped and counted. Supervised examples are limited as a whole, by
    `train.max_tokens_per_microbatch`."""
    shuffle: bool = True
    """true: a new order each epoch, decided by the run's seed. false: the order of the file, every epoch."""

    def __post_init__(self) -> None:
        path, count = split_count(self.path)
        if not path:
            raise ValueError("path must name a dataset, got ''")
        if count == 0:
            raise ValueError(f"path must keep at least 1 record, got {self.path!r}")
        if self.evaluation_path is not None:
            if split_count(self.evaluation_path)[1] is not None:
                raise ValueError(
                    f"evaluation_path must not carry a count, got {self.evaluation_path!r}; use evaluation_count"
                )
            if self.evaluation_count == 0:
                raise ValueError(
                    f"evaluation_count must be above 0 to use evaluation_path={self.evaluation_path!r}, got 0"
                )
        if self.evaluation_count < 0:
            raise ValueError(f"evaluation_count must be at least 0 (0 holds out nothing), got {self.evaluation_count}")
        if self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
