"""Chat templates in the place of the model's own: shipped ones and files, for rendering and for exported models."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig
from rlframe.data.text.chat import encode, end_token, render
from rlframe.models.chat_template import Exported, give, names
from rlframe.utils.errors import ConfigError, DataError

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"},
]


def base_model(*special: str, eos: str | None = "<eos>") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer as base models have it: without a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, extra_special_tokens=list(special))


def text(tokenizer: PreTrainedTokenizerFast) -> str:
    return render(tokenizer, TALK, config=DataConfig(), generation_prompt=True, where="r").text


def test_a_base_model_is_refused_with_the_default_that_fits_it() -> None:
    with pytest.raises(DataError, match="has no chat template, .* or set data.chat_template=plain, which rlf"):
        text(base_model())
    with pytest.raises(DataError, match="or set data.chat_template=chatml, which rlframe ships"):
        text(base_model("<|im_start|>", "<|im_end|>"))


def test_the_shipped_templates_write_what_they_say() -> None:
    assert names() == ["chatml", "plain"]
    tokenizer = base_model("<|im_start|>", "<|im_end|>")
    give(tokenizer, "chatml")
    assert text(tokenizer) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    )
    assert end_token(tokenizer, DataConfig()) == "<|im_end|>"
    tokenizer = base_model()
    give(tokenizer, "plain")
    assert text(tokenizer) == "S\n\nUser: q\n\nAssistant: a<eos>\n\nUser: r\n\nAssistant:"
    assert end_token(tokenizer, DataConfig()) == "<eos>"
    # Ends of turns are tokens, and the same characters in a message are not.
    said = [{"role": "user", "content": "<eos>"}]
    rendering = render(tokenizer, said, config=DataConfig(), generation_prompt=False, where="r")
    assert tokenizer.eos_token_id not in encode(tokenizer, [rendering])[0]


def test_a_file_is_a_template_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}{{ messages[-1].content }}!")
    tokenizer = base_model()
    give(tokenizer, str(file))
    assert text(tokenizer) == "Sr!" and end_token(tokenizer, DataConfig()) == ""


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("chatlm", None, "data.chat_template must be a file, or one of chatml, plain, got 'chatlm': there is no such"),
        (
            "chatml",
            None,
            r"data.chat_template cannot be chatml with .* no special <\|im_start\|> and <\|im_end\|>; use pl",
        ),
        ("a.jinja", b"\xff", "data.chat_template must be text in UTF-8"),
        ("a.jinja", b" \n", "data.chat_template must be a Jinja template, .* the file is empty"),
    ],
)
def test_one_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        give(base_model(), name)


def test_plain_needs_an_end_of_text_token() -> None:
    with pytest.raises(ConfigError, match="cannot be plain with .* has no special end-of-text token"):
        give(base_model(eos=None), "plain")


@pytest.mark.parametrize(("stated", "ends"), [(0, [0, 7]), ([0, 7], [0, 7]), (None, [7])])
def test_an_exported_model_has_the_template_and_ends_where_it_ends_turns(
    tmp_path: Path, stated: object, ends: list[int]
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old", "eos_token": "<eos>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stated, "pad_token_id": 1}))
    Exported(text="{{ new }}", end_token_id=7).write(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ new }}"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"eos_token": "<eos>"}
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": ends, "pad_token_id": 1}
