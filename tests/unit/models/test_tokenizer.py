"""A tokenizer is made once of the same files, and what one user changes is not another's."""

import os
from pathlib import Path

import pytest
import transformers

from rlframe.models import tokenizer
from tests.rollout_models import make_with_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_with_tokenizer("qwen3_tied", tmp_path)


def test_the_same_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer.load(folder)

    def again(*arguments: object, **options: object) -> None:
        raise AssertionError("read once")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", again)
        other = tokenizer.load(folder)
    assert other is not made and tokenizer.fingerprint(other) == tokenizer.fingerprint(made)
    other.chat_template = "{{ messages }}"
    assert tokenizer.load(folder).chat_template == made.chat_template != other.chat_template


def test_files_that_changed_are_read_again(folder: Path) -> None:
    made = tokenizer.load(folder)
    made.eos_token = "<pad>"
    made.save_pretrained(folder)
    # In a file system whose clock is coarse both may have been written at the same time.
    os.utime(folder / "tokenizer_config.json", ns=(1, 1))
    assert tokenizer.load(folder).eos_token == "<pad>"
