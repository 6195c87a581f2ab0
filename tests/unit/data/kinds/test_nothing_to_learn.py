"""Items without a token in the loss: never dealt, always counted, and told once."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig, TextLayout
from rlframe.data.kinds import find_source
from rlframe.data.kinds.preferences import PreferenceSource
from rlframe.data.kinds.unpaired import UnpairedSource
from rlframe.data.training import TrainingSource
from rlframe.utils.errors import DataError
from tests.unit.data.marks import record, write
from tests.unit.data.test_cache import ROWS

LISTENING = "{% for m in messages %}{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
"""A template that writes nothing where the assistant speaks."""
BARE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template without a token that ends a turn, so that a turn may be empty."""


def templated(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>")
    made.chat_template = template
    return made


def stream_of(kind: str, path: str, tokenizer: PreTrainedTokenizerFast, **settings: object) -> TrainingSource:
    config = DataConfig(path=path, cache_folder=None, **{"evaluation_count": 0} | settings)  # type: ignore[arg-type]
    return find_source(kind)(config, tokenizer=tokenizer, seed=0, max_tokens=100)


@pytest.mark.parametrize("kind", ["examples", "unpaired", "preferences"])
def test_a_template_that_leaves_out_the_assistant_is_refused_with_the_count(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    path = write(tmp_path / "a.jsonl", ROWS[kind][:20])
    with pytest.raises(DataError, match=r"with a token to learn.*found none; .* has no token to learn': 20"):
        stream_of(kind, path, templated(tokenizer, LISTENING))


@pytest.mark.parametrize("kind", ["texts", "labelled", "contrasted"])
def test_what_has_no_turns_always_has_something_to_learn(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    stream = stream_of(kind, write(tmp_path / "a.jsonl", ROWS[kind]), templated(tokenizer, LISTENING))
    assert all(part.weights.any() for item in stream.next(len(stream)) for part in item.parts)


@pytest.mark.parametrize(
    ("kind", "empty"),
    [
        ("examples", {"prompt": "q", "response": ""}),
        ("unpaired", {"prompt": "q", "response": "", "label": True}),
        # The prompt alone would be the rejected sequence: its log ratio would be 0 whatever the policy does.
        ("preferences", {"prompt": "q", "chosen": "y", "rejected": [{"role": "assistant", "content": ""}]}),
    ],
)
def test_an_empty_answer_is_left_out_counted_and_told_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture, kind: str, empty: dict
) -> None:
    rows = [*ROWS[kind][:20], *({**empty, "id": f"empty{index}"} for index in range(3))]
    stream = stream_of(kind, write(tmp_path / "a.jsonl", rows), templated(tokenizer, BARE))
    assert len(stream) == 20 and stream.dropped == {f"{stream.unit} has no token to learn": 3}
    (told,) = [line for line in caplog.records if line.levelname == "WARNING"]
    assert "has no token to learn': 3" in told.getMessage()


@pytest.mark.parametrize("settings", [{}, {"text_layout": TextLayout.SEPARATE}, {"streaming": True}])
def test_an_empty_text_among_others_is_left_out_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, settings: dict
) -> None:
    rows = [{"text": "ab"}, {"text": ""}, {"text": " \n"}, {"text": "cd"}]
    settings = {"streaming": False, "shuffle": False} | settings
    config = DataConfig(path=write(tmp_path / "a.jsonl", rows), evaluation_count=0, **settings)
    stream = find_source("texts")(config, tokenizer=tokenizer, seed=0, max_tokens=3)
    tokens = [item.parts[0].token_ids.tolist() for item in stream.next(len(stream))]
    # Each text and its end are a whole sequence.
    assert tokens == [[*tokenizer(text, add_special_tokens=False)["input_ids"], 0] for text in ("ab", "cd")]
    assert stream.dropped == {"text is empty": 2}


def test_texts_that_are_all_empty_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"none were made at all; dropped: {'text is empty': 1"):
        stream_of("texts", write(tmp_path / "a.jsonl", [{"text": ""}]), tokenizer)


def test_what_is_held_out_has_something_to_learn_too(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    held_out = write(tmp_path / "b.jsonl", [{"prompt": "p", "response": ""}, {"prompt": "p", "response": "r"}])
    path = write(tmp_path / "a.jsonl", ROWS["examples"][:20])
    stream = stream_of("examples", path, templated(tokenizer, BARE), evaluation_path=held_out, evaluation_count=5)
    assert len(stream.held_out()) == 1 and stream.dropped == {"held-out example has no token to learn": 1}


def test_messages_without_a_weight_are_told_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    silent = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    path = write(tmp_path / "a.jsonl", [{"messages": silent}, *ROWS["examples"][:20]])
    stream = stream_of("examples", path, tokenizer)
    assert len(stream) == 20 and caplog.text.count("'no turn has a weight': 1") == 1


def test_a_conversation_that_a_template_writes_nothing_of_has_no_token_to_judge(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "label": 1}])
    with pytest.raises(DataError, match="a.jsonl:1: the chat template of '' writes nothing"):
        stream_of("labelled", path, templated(tokenizer, "{% if false %}{% endif %}"))


TURN = {"role": "assistant", "content": "y", "weight": 0.5}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (UnpairedSource, {"messages": [{"role": "user", "content": "q"}, TURN], "label": True}),
        (PreferenceSource, {"prompt": "q", "chosen": [TURN], "rejected": "n"}),
        (PreferenceSource, {"prompt": "q", "chosen": "y", "rejected": TURN}),
        (PreferenceSource, {"prompt": "q", "chosen": [TURN | {"weight": None, "train": False}], "rejected": "n"}),
        (PreferenceSource, {"prompt": "q", "chosen": "y", "rejected": [TURN | {"weight": None, "loss": False}]}),
    ],
)
def test_a_weight_on_what_is_compared_as_a_whole_is_refused(kind: type[TrainingSource], fields: dict) -> None:
    with pytest.raises(DataError, match=r"s:1: expected no weight on .*, which counts as a whole, found (0.5|False)"):
        kind.understand(record(**json.loads(json.dumps(fields))), DataConfig())
