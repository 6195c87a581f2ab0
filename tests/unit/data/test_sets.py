"""Whole datasets of prompts, as evaluations and mode=generate read them."""

import json
from pathlib import Path

import pytest

from rlframe.data import builtin
from rlframe.data.config import DataConfig
from rlframe.data.prompts import PromptSource
from rlframe.data.sets import read_prompts, settings_of
from rlframe.models import tokenizer
from rlframe.models.hub import EMBEDDED
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import DataError

WORDS = tokenizer.load(EMBEDDED / "qwen3_moe_tiny")


def written(file: Path, *records: dict[str, str]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def prompts(path: str | list[str], *, salt: str = "", **settings: str) -> list[Prompt]:
    config = settings_of(DataConfig(path="arithmetic", max_prompt_tokens=16, **settings), path)
    found, ids = read_prompts(config, tokenizer=WORDS, part=builtin.Split.HELD_OUT, salt=salt)
    assert [prompt.id for prompt in found] == ids
    return list(found)


def test_every_record_is_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *({"prompt": f"{number}+1=", "answer": "x"} for number in range(40)))
    found = prompts(path)
    assert [prompt.messages[-1]["content"] for prompt in found] == [f"{number}+1=" for number in range(40)]
    assert {prompt.answer for prompt in found} == {"x"}


def test_a_count_keeps_some_that_the_salt_decides(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *({"prompt": f"{number}+1="} for number in range(40)))
    first, again, other = (prompts(f"{path}#5", salt=salt) for salt in ("a", "a", "b"))
    assert len(first) == 5 and first == again and first != other


def test_a_count_of_more_records_than_there_are_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "a.jsonl", *({"prompt": f"{number}+1="} for number in range(5)))
    prompts(f"{path}#5")
    assert not caplog.messages
    assert len(prompts(f"{path}#500")) == 5
    PromptSource(DataConfig(path=f"{path}#500", evaluation_count=0), tokenizer=WORDS, seed=0)
    assert caplog.messages == [f"{path}#500: there are only 5 records, which are all used"] * 2


def test_several_datasets_may_number_their_records_alike(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{name}.jsonl", {"id": "1", "prompt": f"{name}="}) for name in ("12", "34")]
    assert len({prompt.id for prompt in prompts(paths)}) == 2


def test_prompts_that_are_too_long_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = {"prompt": "1+" * 20}
    found = prompts(written(tmp_path / "a.jsonl", {"prompt": "1+1="}, long))
    assert len(found) == 1
    assert "1 prompts of more than data.max_prompt_tokens=16 tokens are left out" in caplog.text
    with pytest.raises(DataError, match="found none; the shortest has"):
        prompts(written(tmp_path / "b.jsonl", long))


def test_settings_of_training_that_do_not_fit_another_dataset_are_left_out() -> None:
    training = DataConfig(path="train.jsonl", evaluation_path="held.jsonl", evaluation_count=7, system_prompt="Short.")
    own = settings_of(training, "other.jsonl", system_prompt=None, answer_key="label")
    assert (own.path, own.evaluation_path, own.system_prompt, own.answer_key) == (
        "other.jsonl",
        None,
        "Short.",
        "label",
    )
    streamed = DataConfig(path="train.jsonl", streaming=True, shuffle_buffer=7)
    assert not settings_of(streamed, "other.jsonl#5").streaming


@pytest.mark.thorough
def test_the_held_out_part_of_a_built_in_dataset_is_what_training_holds_out() -> None:
    training = PromptSource(DataConfig(path="arithmetic"), tokenizer=WORDS, seed=0)
    held_out = {prompt.text for prompt in training.evaluation_prompts()}
    found = {prompt.text for prompt in prompts("arithmetic")}
    assert held_out <= found and found.isdisjoint(prompt.text for prompt in training.first(100))
