"""A corpus to search and questions about it, for the recipe `grpo_qwen3_4b_search`.

python examples/search_task.py search_task
python examples/search_task.py search_task --dataset hotpotqa/hotpot_qa:distractor:train --count 2000

Without a dataset both are made up: no model can know the answers, and each needs two documents, of a person and of the
city where that person was born. With one, its records are read as those of HotpotQA {question, answer, context: {title,
sentences}}: the paragraphs of all of them together are the corpus.
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from itertools import islice, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any

Rows = list[dict[str, str]]
BEGINNINGS = ("Bal", "Cor", "Dem", "Fal", "Gor", "Hes", "Jor", "Kel")
ENDS = ("an", "beck", "dor", "ia", "mund", "os", "una")
FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo")
LAST = ("Arlo", "Boone", "Crane", "Dunn", "Estes", "Frey")
RIVERS = ("Amber", "Black", "Cold", "Deep", "Fair", "Grey", "High", "Long")


def made_up(count: int, *, seed: int) -> tuple[Rows, Rows]:
    """Returns documents and questions about so many people, always the same ones for a seed."""
    choose = random.Random(seed)
    cities = ["".join(parts) for parts in product(BEGINNINGS, ENDS)]
    rivers = {city: f"{choose.choice(RIVERS)} {choose.choice(ENDS).title()} River" for city in cities}
    corpus = [
        {"title": city, "text": f"{city} is a city on the {river}. It has {choose.randrange(2, 90)} schools."}
        for city, river in rivers.items()
    ]
    names = [f"{first} {letter}. {last}" for letter, first, last in product(ascii_uppercase, FIRST, LAST)]
    people = {name: choose.choice(cities) for name in choose.sample(names, min(count, len(names)))}
    corpus += [
        {"title": name, "text": f"{name} was born in {city} in {choose.randrange(1800, 2000)}."}
        for name, city in people.items()
    ]
    questions = [
        {"prompt": f"On which river is the city where {name} was born?", "answer": rivers[city]}
        for name, city in people.items()
    ]
    return corpus, questions


def from_records(records: Iterable[Mapping[str, Any]]) -> tuple[Rows, Rows]:
    """Returns the paragraphs, each once, and the questions of records of HotpotQA."""
    corpus: dict[str, str] = {}
    questions = []
    for record in records:
        context = record["context"]
        for title, sentences in zip(context["title"], context["sentences"], strict=True):
            corpus.setdefault(title, "".join(sentences))
        questions.append({"prompt": record["question"], "answer": record["answer"]})
    return [{"title": title, "text": text} for title, text in corpus.items()], questions


def write(folder: Path, corpus: Rows, questions: Rows) -> None:
    """Writes `corpus.jsonl` and `questions.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", corpus), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dataset", help="id, configuration and split of a dataset of the hub, as NAME:CONFIG:SPLIT")
    parser.add_argument("--count", type=int, default=1000, help="number of questions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.dataset is None:
        made = made_up(options.count, seed=options.seed)
    else:
        from datasets import load_dataset  # noqa: PLC0415 - only here

        name, config, split = options.dataset.split(":")
        made = from_records(islice(load_dataset(name, config, split=split, streaming=True), options.count))
    write(options.folder, *made)


if __name__ == "__main__":
    main()
