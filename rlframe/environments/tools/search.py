"""Searches a local corpus by words."""

import asyncio
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from rlframe.environments.tools.base import Schema, Tool, ToolError
from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

KEY = "environment.options.tools"
KINDS = (".jsonl", ".txt", ".md")
ENCODING = "utf-8-sig"
"""UTF-8, with or without the mark that editors of Windows begin a file with."""
LONGEST_QUERY = 2000
"""Greatest number of characters of a query."""
WORDS = re.compile(r"\w+")


@dataclass(kw_only=True, slots=True)
class SearchConfig:
    """Settings of the corpus and of what a search returns."""

    corpus: Annotated[str, PathText()]
    """A file or a folder. In a .jsonl file, each line is a document. A .txt or .md file is one document, whose title is
    its name. A folder counts with all such files below it, but for hidden ones, whose name or folder begins with a
    dot."""
    text_field: str = "text"
    """The field of a line that holds the text."""
    title_field: str = "title"
    """The field of a line that holds the title. A line may have none."""
    top_k: Annotated[int, Range(1, 1000)] = 3
    """Greatest number of documents that a search returns."""
    max_document_characters: Annotated[int, Range(1, 1_000_000)] = 1000
    """Greatest number of characters of each. Of a longer one, the part with most words of the query is returned."""
    function: str = "search"
    """Name by which the policy calls it. Of two corpora, one needs another name."""
    description: str = "Returns the documents that fit a query best."
    """Description of the function, which the policy reads."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A document of the corpus."""

    title: str
    text: str


class Index:
    """Ranks documents by BM25."""

    def __init__(self, documents: list[Document]):
        """Raises ConfigError if no document has a word."""
        self.documents = documents
        words = [words_of(f"{document.title} {document.text}") for document in documents]
        self._known = frozenset(word for each in words for word in each)
        if not self._known:
            raise _refused(f"none of its {len(documents)} documents has a word, so that nothing can be found")
        self._ranking = ranking()
        self._ranking.index(words, show_progress=False)

    def search(self, query: str, top_k: int) -> list[Document]:
        """Returns the best documents that have a word of the query, best first. Equally good ones keep their order."""
        words = [word for word in words_of(query) if word in self._known]
        if not words:
            return []
        scores = np.asarray(self._ranking.get_scores(words))
        best = np.argsort(-scores, kind="stable")[:top_k]
        return [self.documents[number] for number in best if scores[number] > 0]


def ranking() -> Any:
    """Returns a new BM25 of bm25s, which is imported without JAX.

    Workaround for bm25s 0.3.16 (https://github.com/xhluca/bm25s/blob/main/bm25s/selection.py): where JAX is installed,
    its import computes on JAX's default device, which takes three quarters of a GPU's memory, and fails within the
    limits of a session. Not needed any more once that file calls JAX in functions only.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    hidden = "jax" not in sys.modules
    if hidden:
        # The import of such a module is refused.
        sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]
    try:
        from bm25s import BM25
    finally:
        if hidden:
            del sys.modules["jax"]
    return BM25()


class Search(Tool):
    """Returns documents of a corpus. The index is built once in each process."""

    indices: ClassVar[dict[str, Index]] = {}
    """By the text of the settings, because several tools may be of this kind."""

    @classmethod
    def prepare(cls, config: SearchConfig) -> None:
        """Reads the corpus, and builds the index.

        Raises:
            ConfigError: the corpus or the package of the index is not there, or a line is no document.
        """
        try:
            cls.indices[repr(config)] = Index(list(documents(config)))
        except ModuleNotFoundError as error:
            if error.name != "bm25s":
                raise
            fault = Fault(KEY, said="the tool search needs the package bm25s: pip install 'rlframe[agents]'")
            raise ConfigError([fault]) from None

    def __init__(self, config: SearchConfig):
        self._config, self._index = config, self.indices[repr(config)]

    @property
    def schemas(self) -> list[Schema]:
        """See Tool."""
        query = {"type": "string", "description": "Words to look for."}
        return [
            {
                "type": "function",
                "function": {
                    "name": self._config.function,
                    "description": self._config.description,
                    "parameters": {"type": "object", "properties": {"query": query}, "required": ["query"]},
                },
            }
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See Tool."""
        query = arguments.get("query")
        if not isinstance(query, str):
            raise ToolError(f"query must be text, got {query!r:.80}")
        if len(query) > LONGEST_QUERY:
            raise ToolError(f"a query must have at most {LONGEST_QUERY} characters, got {len(query)}")
        return await asyncio.to_thread(self._found, query)

    def _found(self, query: str) -> str:
        found, most = self._index.search(query, self._config.top_k), self._config.max_document_characters
        texts = [f"[{number}] {each.title}\n{passage(each.text, query, most)}" for number, each in enumerate(found, 1)]
        return "\n\n".join(texts) or "(no document has any of these words)"


def words_of(text: str) -> list[str]:
    """Returns the words of a text, in small letters."""
    return WORDS.findall(text.lower())


def passage(text: str, query: str, most: int) -> str:
    """Returns the part of a text, of at most `most` characters, that has most words of the query."""
    if len(text) <= most:
        return text
    wanted = set(words_of(query))
    places = [found.start() for found in WORDS.finditer(text) if found.group().lower() in wanted]
    # Some words before the first one that was looked for.
    starts = [0, *(max(0, min(place - most // 4, len(text) - most)) for place in places)]
    best = max(starts, key=lambda start: bisect_left(places, start + most) - bisect_left(places, start))
    return text[best : best + most]


def documents(config: SearchConfig) -> Iterator[Document]:
    """Yields the documents of a corpus, those of a folder in the order of their paths.

    Raises:
        ConfigError: the corpus does not exist or is empty, or a line is no document.
    """
    corpus = Path(config.corpus)
    files = sorted(_below(corpus)) if corpus.is_dir() else [corpus]
    number = 0
    for file in files:
        try:
            for document in _lines(file, config) if file.suffix == ".jsonl" else _whole(file):
                number += 1
                yield document
        except (OSError, UnicodeDecodeError) as error:
            raise _refused(f"{file} cannot be read: {error}") from None
    if not number:
        raise _refused(f"{corpus} holds no document: no line of a .jsonl file, no .txt and no .md file")


def _below(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder that hold documents, none of which is hidden."""
    for each in folder.rglob("*"):
        if each.suffix in KINDS and not any(part.startswith(".") for part in each.relative_to(folder).parts):
            yield each


def _whole(file: Path) -> Iterator[Document]:
    yield Document(title=file.stem, text=file.read_text(encoding=ENCODING))


def _lines(file: Path, config: SearchConfig) -> Iterator[Document]:
    with file.open(encoding=ENCODING) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise _refused(f"line {number} of {file} is no JSON: {error}") from None
            text = record.get(config.text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise _refused(
                    f"line {number} of {file} has no text in its field {config.text_field!r}; set text_field to one of "
                    f"{', '.join(map(repr, record)) if isinstance(record, dict) else 'a JSON object'}"
                )
            title = record.get(config.title_field)
            yield Document(title=title if isinstance(title, str) else f"{file.stem}:{number}", text=text)


def _refused(why: str) -> ConfigError:
    return ConfigError([Fault(KEY, said=f"the corpus of the tool search: {why}")])


COMPONENT, CONFIG = Search, SearchConfig
