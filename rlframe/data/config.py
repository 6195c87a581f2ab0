"""Settings of the data. Imports neither torch nor transformers."""

import re
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from rlframe.data import builtin
from rlframe.data.curriculum import By, CurriculumConfig
from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import SettingError

AUTO = "auto"
EVALUATION_COUNT = 256
CACHE_GB = 20.0
SHUFFLE_BUFFER = 10_000
COUNT_SUFFIX = re.compile(r"(.+)#(\d+)")


TEMPLATE_SETTINGS = frozenset({"chat_template", "chat_template_kwargs", "chat_template_date", "template_limit_s"})
"""Fields of DataConfig that every kind of data with conversations uses."""


def split_count(path: str) -> tuple[str, int | None]:
    """Returns `name#500` as ("name", 500); a path without a count as (path, None)."""
    match = COUNT_SUFFIX.fullmatch(path)
    return (match[1], int(match[2])) if match else (path, None)


class TextLayout(StrEnum):
    """Ways in which raw text becomes sequences."""

    JOINED = "joined"
    """Documents in a row, each begun as the tokenizer begins a text and ended by the end-of-text token, split into
    sequences of train.max_tokens_per_microbatch (times the context-parallel ranks), at most the model's positions. A
    sequence may begin and end within a document."""
    SEPARATE = "separate"
    """Each document is a sequence of its own; a longer one is split. Micro-batches pack them, and no document sees
    another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One dataset of `data.path`."""

    path: str
    """Path as in `DataConfig.path`, without a count."""
    count: int | None
    """Number of records to train on, chosen by the run's seed. None means all."""
    name: str
    """Short, unique name of the dataset in its metrics."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Settings of the records that a run trains on and holds out."""

    path: Annotated[
        str | list[str] | dict[str, float], PathText(), Range(above=0, maximum=10**9, note="the weight of a dataset")
    ] = "arithmetic"
    """One of the built-in `arithmetic`, `arithmetic_homework`, `arithmetic_preferences`, `arithmetic_unpaired`,
    `arithmetic_answers`, `arithmetic_carries`, `arithmetic_questions`, `multiplication`, `multiplication_homework` and
    `reasoning_gym_homework`, tasks `reasoning_gym:NAME` or `verifiers:ID` (see reasoning_gym.py and verifiers.py in
    rlframe/data/builtin), a .jsonl, .json, .parquet or .txt file, a folder of such files, or a Hugging Face dataset
    `owner/name[:subset[:split]]`. A suffix `#500` trains on 500 records, chosen by the run's seed. A list of these is
    one dataset made of all, each record once per epoch. A mapping of these to weights mixes them: the weights,
    whatever they add up to, are the shares of what is dealt, and each dataset has epochs of its own."""
    evaluation_path: Annotated[str | None, PathText()] = None
    """Held-out records, in the same forms as one `path`. null holds out `evaluation_count` records of `path`, chosen by
    a hash of their ids, the same ones for every seed, and of prompts with at most a tenth of all records: other records
    of these prompts are dropped."""
    evaluation_count: Annotated[int, Range(0, 10**9, note="0 holds out nothing")] = EVALUATION_COUNT
    """Greatest number of held-out records, chosen by a hash of their ids. 0 holds out nothing. A streamed `path` holds
    out none: they come from `evaluation_path`, or there are none."""
    prompt_key: str | None = None
    """Field of the prompt: text or a list of {role, content}. null recognises known shapes of records."""
    answer_key: str | None = None
    """Field of the answer. null recognises known shapes of records."""
    system_prompt: str | None = None
    """System message of conversations that have none of their own."""
    last_turn_only: bool = False
    """Whether only the assistant's last turn of a conversation is learned. Otherwise every turn of the assistant is,
    except in a `prompt` that stands apart from its response. A message can override both: its `weight` is the weight of
    its tokens relative to the others', and 0 masks them, as `train: false` and `loss: false` do."""
    text_layout: TextLayout = TextLayout.JOINED
    """Way in which the raw text of pre-training becomes sequences."""
    labels: list[str] | None = None
    """Names of the classes of labelled data, in the order of their numbers. null means the sorted names of the data."""
    special_tokens_in_text: bool = False
    """Whether text of a record that reads like a special token, such as `<|im_end|>`, becomes that token, as if the
    chat template had written it. Otherwise it stays text."""
    chat_template: Annotated[str | None, PathText()] = None
    """Chat template in the place of the model's own, for prompts, training data, held-out records and turns of an
    attempt: a Jinja file, or one that rlframe ships. chatml is that of Qwen without tools, for tokenizers with
    <|im_start|> and <|im_end|>; plain writes `User: ...` and `Assistant: ...`, and needs an end-of-text token only.
    Exported models have it too. null is the model's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Keyword arguments of the chat template, such as `{enable_thinking: false}`, for every conversation that is
    rendered: prompts, training data, held-out records and turns of an attempt. One that the template never reads is
    refused."""
    chat_template_date: str | None = None
    """Day that a chat template with `strftime_now` writes, such as 2026-11-28. null is the day on which the run began,
    which its config.yaml keeps, so that a resumed run renders the same. One that the template never reads is
    refused."""
    template_limit_s: Annotated[float, Range(above=0, maximum=3600)] = 10.0
    """Greatest time in seconds in which the chat template may render a conversation."""
    max_record_mb: Annotated[float, Range(above=0, maximum=100_000)] = 16.0
    """Greatest size of a record in MB (1e6 bytes): a line, a row of a Parquet file, or a whole .txt file. A longer one
    is refused."""
    max_prompt_tokens: Annotated[int, Range(1, 1 << 24)] = 1024
    """Greatest number of tokens of a prompt. Longer prompts are dropped and counted. Sequences of offline training are
    limited as a whole, by `train.max_tokens_per_microbatch`."""
    num_processes: Annotated[int | None, Range(1, 1024)] = None
    """Number of processes that render and tokenise records. null is one for each 20,000 conversations, at most one for
    each core. Results do not depend on it."""
    cache_folder: Annotated[str | None, PathText()] = AUTO
    """Folder in which records of files above 32 MB, and the tokenised items of offline training, are kept for later
    runs with the same files, tokenizer, template, settings and code. auto is $XDG_CACHE_HOME/rlframe/data, or
    ~/.cache/rlframe/data. null keeps none. Items of datasets of the hub are not kept."""
    cache_gb: Annotated[float, Range(above=0, maximum=10**6, note="cache_folder=null keeps nothing")] = CACHE_GB
    """Greatest size of that folder in GB (1e9 bytes). When a file is written, those that were not read for longest are
    removed."""
    streaming: bool = False
    """Whether the records of `path` are read as they are needed, for training on more than fits in memory. Supports
    .jsonl, .parquet, .txt and datasets of the hub. A list of datasets is read one after the other; a mapping deals
    their shares throughout. Checkpoints store the position, so that a resumed run continues exactly. Repeated records
    are dealt repeatedly, prompts once in a window, and a malformed record ends the run when it is reached."""
    shuffle_buffer: Annotated[int, Range(1, 10**9)] = SHUFFLE_BUFFER
    """Number of records of each streamed dataset (of all, in a list) that are read, tokenised, packed and shuffled
    together, and held at a time. A record changes places only with those."""
    shuffle: bool = True
    """Whether each epoch has a new order, decided by the run's seed. Otherwise every epoch has the order of the
    file."""
    curriculum: CurriculumConfig | None = None
    """Order of the prompts of online algorithms by what is known of them. null has none."""

    def __post_init__(self) -> None:
        check_bounds(self)
        self._check_paths()
        if self.evaluation_path is not None:
            if split_count(self.evaluation_path)[1] is not None:
                raise SettingError(
                    "evaluation_path",
                    "must not carry a count",
                    got=repr(self.evaluation_path),
                    hint="use evaluation_count",
                )
            if self.evaluation_count == 0:
                raise SettingError(
                    "evaluation_count", f"must be above 0 to use evaluation_path={self.evaluation_path!r}", got="0"
                )
        if self.labels is not None and (len(self.labels) < 2 or len(set(self.labels)) < len(self.labels)):
            raise SettingError("labels", "must be at least 2 different names", got=self.labels)
        if self.chat_template_date is not None:
            try:
                date.fromisoformat(self.chat_template_date)
            except ValueError:
                raise SettingError(
                    "chat_template_date", "must be a day such as 2026-11-28", got=repr(self.chat_template_date)
                ) from None
        if self.cache_gb != CACHE_GB and (self.cache_folder is None or self.streaming):
            why = "streaming=true" if self.streaming else "cache_folder=null"
            raise SettingError("cache_gb", f"has no effect with {why}", got=self.cache_gb, hint="remove it")
        self._check_streaming()
        self._check_curriculum()

    @property
    def max_record_bytes(self) -> float:
        """`max_record_mb`, in bytes."""
        return self.max_record_mb * 1e6

    @property
    def holds_out(self) -> bool:
        """Returns whether the settings allow records to be held out."""
        return self.evaluation_count > 0 and (self.evaluation_path is not None or not self.streaming)

    @property
    def reads_files(self) -> bool:
        """Returns whether any record comes from outside the package."""
        paths = [entry.path for entry in self.entries()]
        if self.evaluation_path is not None:
            paths.append(self.evaluation_path)
        return not all(map(builtin.has, paths))

    @property
    def weights(self) -> list[float] | None:
        """Relative share of each entry. None if the entries are one dataset."""
        return list(self.path.values()) if isinstance(self.path, dict) else None

    @property
    def what(self) -> str:
        """`path`, for a sentence."""
        return ", ".join(self._paths())

    def entries(self) -> list[Entry]:
        """Returns the datasets of `path`, in its order."""
        names = self._names()
        split = [split_count(path) for path in self._paths()]
        return [Entry(path=path, count=count, name=names[path]) for path, count in split]

    def channels(self) -> tuple[str, ...]:
        """Returns names of the datasets that items come from: those of `path` in its order, then that of
        `evaluation_path` if it is none of them."""
        return tuple(self._names().values())

    @property
    def evaluation_channel(self) -> int:
        """Index of `evaluation_path` in `channels`."""
        assert self.evaluation_path is not None
        return list(self._names()).index(self.evaluation_path)

    def _names(self) -> dict[str, str]:
        """Returns a name for each dataset by its path: short, unless two would have the same."""
        paths = [split_count(path)[0] for path in self._paths()]
        if self.evaluation_path is not None and self.evaluation_path not in paths:
            paths.append(self.evaluation_path)
        short = [builtin.short_name(path) or Path(path).stem or path for path in paths]
        return {path: name if short.count(name) == 1 else path for path, name in zip(paths, short, strict=True)}

    def _paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path)

    def _check_paths(self) -> None:
        if not self.path:
            raise SettingError("path", "must name a dataset", got=repr(self.path))
        names = [split_count(path)[0] for path in self._paths()]
        for path, name in zip(self._paths(), names, strict=True):
            if not name:
                raise SettingError("path", "must name a dataset", got="''")
            if split_count(path)[1] == 0:
                raise SettingError("path", "must keep at least 1 record", got=repr(path))
            if name in builtin.FORMER_NAMES:
                hint = f"its name is now {builtin.FORMER_NAMES[name]}"
                raise SettingError("path", "must name a dataset", got=repr(name), hint=hint)
            if names.count(name) > 1:
                raise SettingError("path", "must name each dataset once", got=f"{name!r} twice")

    def _check_curriculum(self) -> None:
        if self.curriculum and self.streaming:
            raise SettingError(
                "curriculum",
                "must be null with streaming=true",
                got=self.curriculum.by,
                why="the order of what is streamed is that of the files",
            )
        if self.curriculum and self.curriculum.by is By.STAGE and self.weights:
            raise SettingError(
                "curriculum.by",
                "must not be stage with weights of several datasets",
                got=self.curriculum.by,
                why="a stage has epochs of its own, and so has each of these datasets",
            )

    def _check_streaming(self) -> None:
        if not self.streaming:
            if self.shuffle_buffer != SHUFFLE_BUFFER:
                raise SettingError(
                    "shuffle_buffer", "has no effect without streaming=true", got=self.shuffle_buffer, hint="remove it"
                )
            return
        if counted := [path for path in self._paths() if split_count(path)[1] is not None]:
            raise SettingError(
                "path",
                "must not carry a count with streaming=true",
                got=repr(counted[0]),
                why="which records to keep is chosen among all",
            )
        if self.evaluation_path is None and self.evaluation_count not in (0, EVALUATION_COUNT):
            raise SettingError(
                "evaluation_count",
                "has no effect with streaming=true and no evaluation_path",
                got=self.evaluation_count,
                hint="name held-out records with evaluation_path",
            )
        if self.cache_folder != AUTO:
            raise SettingError(
                "cache_folder", "has no effect with streaming=true", got=self.cache_folder, hint="remove it"
            )
