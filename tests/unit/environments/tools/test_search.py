"""The tool search: what it finds, and in which order."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from rlframe.environments.tools.search import Document, Index, Search, SearchConfig, passage, ranking
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError
from tests.unit.environments.tools.test_tools import called, contents, session

pytest.importorskip("bm25s")
ROWS = [
    {"title": "Tides", "text": "The moon pulls the sea."},
    {"title": "Moon", "text": "The moon is a moon of the earth."},
    {"text": "Bread is made of flour."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "Yeast.txt").write_text("Yeast makes bread rise, and beer.")
    (tmp_path / "below" / "left_out.bin").write_bytes(b"\xff")
    return tmp_path


def found(corpus: Path, query: Any, **options: Any) -> str:
    """The answer to a query."""
    tools = {"search": {"name": "search", "options": {"corpus": str(corpus), **options}}}
    offered, (step,) = session([called(("search", {"query": query}))], tools=tools)
    assert offered == ["search"]
    return contents(step)[0]


def test_the_best_documents_come_first(corpus: Path) -> None:
    assert found(corpus, "Moon?") == (
        "[1] Moon\nThe moon is a moon of the earth.\n\n[2] Tides\nThe moon pulls the sea."
    )
    assert found(corpus, "moon", top_k=1) == "[1] Moon\nThe moon is a moon of the earth."
    assert (
        found(corpus, "bread beer")
        == "[1] Yeast\nYeast makes bread rise, and beer.\n\n[2] a:3\nBread is made of flour."
    )


def test_scores_are_those_of_bm25() -> None:
    """By hand, with k1 = 1.5 and b = 0.75: `a` is in 1 of 2 documents, which are of 4 and 2 words (mean 3)."""
    index = Index([Document(title="x", text="a a b"), Document(title="y", text="b")])
    rarity = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    score = rarity * 2 / (2 + 1.5 * (1 - 0.75 + 0.75 * 4 / 3))
    assert index._ranking.get_scores(["a"]).tolist() == pytest.approx([score, 0.0])


def test_the_index_takes_no_gpu_for_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where JAX is installed, bm25s would compute with it when it is imported."""
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('no memory left for the default device')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("bm25s", "jax")]:
        monkeypatch.delitem(sys.modules, name)
    assert ranking().corpus is None
    assert "jax" not in sys.modules


def test_what_nobody_wrote_finds_nothing(corpus: Path) -> None:
    for query in ("zebra", "", "?!"):
        assert found(corpus, query) == "(no document has any of these words)"
    assert found(corpus, ["moon"]) == "Error: query must be text, got ['moon']"
    assert found(corpus, "a" * 3000) == "Error: a query must have at most 2000 characters, got 3000"


def test_of_a_long_document_the_part_with_the_words_is_returned(corpus: Path) -> None:
    (corpus / "long.txt").write_text("word " * 100 + "the whale sings " + "word " * 100)
    answer = found(corpus, "whale", max_document_characters=40)
    assert "whale sings" in answer and len(answer) == len("[1] long\n") + 40
    assert passage("abc def", "def", 3) == "def" and passage("abc def", "ghi", 3) == "abc"


def test_two_corpora_are_two_functions(tmp_path: Path) -> None:
    tools = {}
    for name, text in {"fruit": "apples are red", "ships": "boats are blue"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
        tools[name] = {"name": "search", "options": {"corpus": f"{tmp_path}/{name}.txt", "function": f"find_{name}"}}
    offered, (step,) = session(
        [called(("find_fruit", {"query": "apples"}), ("find_ships", {"query": "boats"}))], tools=tools
    )
    assert offered == ["find_fruit", "find_ships"]
    assert contents(step) == ["[1] fruit\napples are red", "[1] ships\nboats are blue"]


def test_the_time_for_a_passage_grows_with_the_document_alone() -> None:
    text = "the " * 100_000
    # Every pair of its words would be 10^10 steps.
    assert passage(text, "the", 400) == text[:400]


def test_fields_are_settings(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"name": "n", "contents": "moon", "text": 3}\n')
    options = {"text_field": "contents", "title_field": "name"}
    assert found(tmp_path / "a.jsonl", "moon", **options) == "[1] n\nmoon"


def test_hidden_files_are_no_documents_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name in (".git/moon.md", "below/.cache/moon.txt", ".moon.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("moon")
    for name, text in {"b.jsonl": '{"text": "moon"}\n', "c.txt": "moon"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert found(tmp_path, "moon", top_k=9) == "[1] c\nmoon\n\n[2] b:1\nmoon"
    # A folder that was named is no hidden one.
    assert found(tmp_path / ".git", "moon") == "[1] moon\nmoon"


def test_a_corpus_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fields.jsonl").write_text('{"a": 1, "b": 2}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"a"\n')
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xff")
    (tmp_path / "empty").mkdir()
    (tmp_path / "wordless.jsonl").write_text('{"text": "...", "title": ""}\n')
    for name, said in {
        "fields.jsonl": "has no text in its field 'text'; set text_field to one of 'a', 'b'",
        "broken.jsonl": "line 2 of .* is no JSON",
        "bytes.txt": "cannot be read",
        "empty": "holds no document",
        "nothing": "cannot be read",
        "wordless.jsonl": "none of its 1 documents has a word",
    }.items():
        with pytest.raises(ConfigError, match=said):
            Search.prepare(SearchConfig(corpus=str(tmp_path / name)))
    with pytest.raises(ConfigError, match="options.corpus must be a string"):
        build(SearchConfig, {}, key="environment.options.tools.search.options")


def test_the_index_is_built_once_for_all_sessions(corpus: Path) -> None:
    config = SearchConfig(corpus=str(corpus))
    Search.prepare(config)
    assert Search(config)._index is Search(SearchConfig(corpus=str(corpus)))._index
