"""The corpus and the questions of the search recipe."""

import json
import sys
from pathlib import Path

import pytest

from tests.meta.checkout import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import search_task

pytestmark = pytest.mark.later


def test_each_made_up_answer_follows_from_two_documents(tmp_path: Path) -> None:
    corpus, questions = search_task.made_up(50, seed=1)
    texts = {document["title"]: document["text"] for document in corpus}
    assert len(questions) == 50 and len(texts) == len(corpus)
    for question in questions:
        name = question["prompt"].removeprefix("On which river is the city where ").removesuffix(" was born?")
        city = texts[name].split(" was born in ")[1].split(" in ")[0]
        assert f"on the {question['answer']}." in texts[city]
        assert question["answer"] not in texts[name]
    search_task.write(tmp_path / "task", corpus, questions)
    assert [json.loads(line) for line in (tmp_path / "task" / "corpus.jsonl").open()] == corpus


def test_records_of_hotpotqa_become_a_corpus_with_each_paragraph_once() -> None:
    context = {"title": ["A", "B"], "sentences": [["One. ", "Two."], ["Three."]]}
    record = {"question": "Who?", "answer": "Me", "context": context, "level": "hard"}
    corpus, questions = search_task.from_records([record, record | {"answer": "You"}])
    assert corpus == [{"title": "A", "text": "One. Two."}, {"title": "B", "text": "Three."}]
    assert [row["answer"] for row in questions] == ["Me", "You"]


def test_the_same_seed_makes_the_same_task() -> None:
    assert search_task.made_up(10, seed=3) == search_task.made_up(10, seed=3) != search_task.made_up(10, seed=4)


@pytest.mark.parametrize("count", [0, 5000])
def test_there_are_as_many_questions_as_there_are_names(count: int) -> None:
    assert len(search_task.made_up(count, seed=0)[1]) == min(count, 26 * 8 * 6)
