"""A tokenizer is made once of the same files, and what one user changes is not another's. Tokens have texts."""

import os
from pathlib import Path

import pytest
import tokenizers
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


def test_a_text_keeps_its_spaces_whatever_the_folder_says_of_cleaning(folder: Path) -> None:
    texts = ["[", "1", " ,", " 2", " !", " ]"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({text: place for place, text in enumerate(texts)}))
    made.decoder = tokenizers.decoders.Fuse()
    cleaning = transformers.PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=True)
    assert cleaning.decode(range(6)) == "[1, 2! ]", "transformers cleans up"
    cleaning.save_pretrained(folder)
    # As above.
    os.utime(folder / "tokenizer_config.json", ns=(1, 1))
    assert tokenizer.load(folder).decode(list(range(6))) == "[1 , 2 ! ]"


class InCapitals(transformers.PreTrainedTokenizerFast):
    """A tokenizer with a way of its own to decode."""

    def _decode(self, *arguments: object, **options: object) -> str:
        return super()._decode(*arguments, **options).upper()


WORDS = ["a dog's name, \u00fcn\u00efcode \U0001f98a", " two  spaces", "tokens of bytes"]


def of_bytes(kind: type[transformers.PreTrainedTokenizerFast]) -> transformers.PreTrainedTokenizerFast:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        WORDS, tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"])
    )
    return kind(tokenizer_object=made, eos_token="<end>")


def of_words() -> transformers.PreTrainedTokenizerFast:
    """As SentencePiece writes them: a word begins with a mark, which a single token's text has no place for."""
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("\u2581dog", -1.0), ("s", -2.0)], 0))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (of_bytes(transformers.PreTrainedTokenizerFast), {" ", "<end>", "\ufffd"}),
        (of_bytes(InCapitals), {"A", "<END>"}),
        (of_words(), {" dog", "s"}),
    ],
)
def test_the_texts_of_tokens_are_those_of_each_by_itself(
    made: transformers.PreTrainedTokenizerFast, found: set[str]
) -> None:
    everything = list(range(len(made)))
    alone = [str(made.decode([token], clean_up_tokenization_spaces=False)) for token in everything]
    texts = tokenizer.pieces(made, everything)
    assert [text.lstrip(" ") for text in texts] == [text.lstrip(" ") for text in alone]
    assert found <= set(texts)
    assert tokenizer.pieces(made, []) == []
