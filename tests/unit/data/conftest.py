"""A byte-level tokenizer with a chat template, and the way to the shared datasets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.data.marks import FORGETTING, with_template

SPECIAL = ["<end>", "<system>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0..3 are the special tokens, the others single bytes. As in Qwen's, a newline follows the end of a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", extra_special_tokens=SPECIAL[1:])
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def forgetting(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with a template that writes the reasoning of the last message only."""
    return with_template(tokenizer, FORGETTING)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public datasets beside the checkout; skips where there is none."""
    folder = Path(__file__).parents[3].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return folder


@pytest.fixture(autouse=True, scope="session")
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps tokenised items away from those of the person who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
