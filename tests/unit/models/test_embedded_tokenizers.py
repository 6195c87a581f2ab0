"""Tokenizers of embedded models, which are loaded without the code of all models."""

import subprocess
import sys

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


@pytest.mark.later
def test_they_do_not_need_the_code_of_models() -> None:
    program = (
        "import sys; from rlframe.models import hub, tokenizer; tokenizer.load(hub.EMBEDDED / 'qwen3_moe_tiny'); "
        "print(sorted({'transformers.modeling_utils', 'transformers.generation.utils'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
