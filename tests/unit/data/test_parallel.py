"""Rendering and tokenisation in several processes: the same as in one, in the same order, with the same errors."""

import os
import threading
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.data import parallel
from rlframe.data.config import DataConfig
from rlframe.data.kinds import find_source
from rlframe.data.parallel import in_chunks, num_processes
from rlframe.data.prompts import PromptSource
from rlframe.data.storage import tables
from rlframe.utils.errors import DataError
from tests.unit.data.chunks import failing_from_14, killing, places_and_process
from tests.unit.data.marks import TURNS, with_template, write

pytestmark = pytest.mark.later


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "CHUNK", 7)


def test_a_process_is_added_for_many_conversations_and_asked_for_at_most_one_a_chunk() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    # Threads, such as those of a run that has begun, change nothing.
    assert num_processes(None, 39_999) == 1
    assert num_processes(None, 10**7) == len(os.sched_getaffinity(0))
    ended.set()
    thread.join()
    assert num_processes(3, 10**7) == 3 and num_processes(3, 14) == 2 and num_processes(3, 0) == 1


@pytest.mark.later
def test_chunks_come_in_their_order_and_so_does_the_first_error() -> None:
    found = list(in_chunks(places_and_process, range(30), processes=2))
    assert [place for places, _ in found for place in places] == list(range(30))
    assert os.getpid() not in {process for _, process in found} and len(found) == 5
    chunks = in_chunks(failing_from_14, range(30), processes=2)
    assert [next(chunks), next(chunks)] == [range(7), range(7, 14)]
    with pytest.raises(DataError, match="record 14"):
        next(chunks)
    with pytest.raises(DataError, match="was killed, as when memory runs out; set data.num_processes to less than 2"):
        list(in_chunks(killing, range(30), processes=2))


def row_of(kind: str, number: int) -> dict:
    answer, other = ({"role": "assistant", "content": text} for text in "bc")
    if kind == "preferences":
        return {"prompt": f"q{number}", "chosen": [answer], "rejected": [other if number % 3 else answer]}
    if kind == "texts":
        return {"text": f"document {number}"}
    turns = [{"role": "system", "content": str(number)}, *TURNS[: 2 * (1 + number % 2)]]
    return {"messages": turns, "label": bool(number % 2)}


@pytest.mark.later
@pytest.mark.parametrize(
    "kind",
    ["examples", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("texts", "preferences", "unpaired"))],
)
def test_items_do_not_depend_on_the_number_of_processes(
    forgetting: PreTrainedTokenizerFast, tmp_path: Path, kind: str
) -> None:
    path = write(tmp_path / "a.jsonl", [row_of(kind, number) for number in range(40)])
    made = []
    for processes in (1, 2):
        config = DataConfig(path=path, cache_folder=None, evaluation_count=0, num_processes=processes)
        source = find_source(kind)(config, tokenizer=forgetting, seed=0, max_tokens=100)
        items = source.next(len(source))
        tokens = [(part.token_ids.tolist(), part.weights.tolist()) for item in items for part in item.parts]
        made.append(([item.id for item in items], tokens, source.metrics(), source.state()))
    assert made[0] == made[1] and sum(len(token_ids) for token_ids, _ in made[0][1]) > 400


@pytest.mark.thorough
@pytest.mark.parametrize("stored", [False, True])
def test_prompts_do_not_depend_on_the_number_of_processes(
    forgetting: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    monkeypatch.setattr(tables, "SMALL_BYTES", 0 if stored else 1 << 30)
    rows = [{"prompt": f"q{number}", "answer": str(number)} for number in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    made = []
    for processes in (1, 2):
        source = PromptSource(DataConfig(path=path, num_processes=processes), tokenizer=forgetting, seed=0)
        made.append((source.next(len(source)), source.evaluation_prompts(), source.state()))
    assert made[0] == made[1] and len(made[0][0]) == 36
    refusing = with_template(forgetting, "{{ raise_exception('no') }}")
    with pytest.raises(DataError, match="a.jsonl:[0-9]+: the chat template of .* refuses turns of user: no"):
        PromptSource(DataConfig(path=path, num_processes=2), tokenizer=refusing, seed=0)
