"""Tokenizers of embedded models, which are loaded without the code of all models."""

import pytest
from transformers import AutoTokenizer

from rlframe.models import hub, tokenizer


@pytest.mark.parametrize("name", hub.embedded_names())
def test_they_are_what_transformers_finds_itself(name: str) -> None:
    folder = hub.EMBEDDED / name
    mine, theirs = tokenizer.load(folder), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert type(mine) is type(theirs) and mine.init_kwargs == theirs.init_kwargs
    assert repr(mine) == repr(theirs) and mine.chat_template == theirs.chat_template
    assert tokenizer.fingerprint(mine) == tokenizer.fingerprint(theirs)
