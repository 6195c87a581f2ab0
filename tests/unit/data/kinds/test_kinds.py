"""Raw text, labelled sequences and contrasted texts: tokens and weights worked by hand.

The tokenizer's ids: 0 is <end>, which ends a text; every other character is one token.
"""

import copy
import logging
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig, TextLayout
from rlframe.data.kinds.contrasted import ContrastedSource
from rlframe.data.kinds.labelled import LabelledSource
from rlframe.data.kinds.preferences import PreferenceSource
from rlframe.data.kinds.texts import TextSource
from rlframe.data.kinds.unpaired import UnpairedSource
from rlframe.data.records import Record
from rlframe.data.training import TrainingSource
from rlframe.utils.errors import DataError
from rlframe.utils.registry import names
from tests.unit.data.marks import marked, record, write


def config_of(folder: Path, rows: list[dict], **settings: object) -> DataConfig:
    settings = {"evaluation_count": 0, "shuffle": False} | settings
    return DataConfig(path=write(folder / "a.jsonl", rows), **settings)  # type: ignore[arg-type]


def stream_of(
    kind: type[TrainingSource], config: DataConfig, tokenizer: PreTrainedTokenizerFast, max_tokens: int = 100
) -> TrainingSource:
    return kind(config, tokenizer=tokenizer, seed=0, max_tokens=max_tokens)


def everything(stream: TrainingSource, tokenizer: PreTrainedTokenizerFast) -> list[list[str]]:
    return [[marked(part, tokenizer) for part in item.parts] for item in stream.next(len(stream))]


def test_every_kind_is_a_file_of_the_folder() -> None:
    assert names("rlframe.data.kinds") == ["contrasted", "examples", "labelled", "preferences", "texts", "unpaired"]


def test_joined_documents_are_cut_into_whole_budgets(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = config_of(tmp_path, [{"text": "abc"}, {"text": "de"}, {"text": "fghi"}])
    stream = stream_of(TextSource, config, tokenizer, 5)
    # abc<end>de<end>fghi<end> is 12 tokens: 5, 5 and 2. Nothing predicts a sequence's first token.
    assert everything(stream, tokenizer) == [["a[b][c][<end>][d]"], ["e[<end>][f][g][h]"], ["i[<end>]"]]
    # One token more, and it stands alone at the end.
    (tmp_path / "b").mkdir()
    stream = stream_of(TextSource, config_of(tmp_path / "b", [{"text": "abcde"}]), tokenizer, 5)
    assert everything(stream, tokenizer) == [["a[b][c][d][e]"]] and stream.dropped == {"single token at an end": 1}


def test_documents_are_cut_to_the_models_positions(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = config_of(tmp_path, [{"text": "abcd"}])
    stream = TextSource(config, tokenizer=tokenizer, seed=0, max_tokens=100, max_positions=3)
    assert everything(stream, tokenizer) == [["a[b][c]"], ["d[<end>]"]] and not stream.dropped


def test_separate_documents_keep_to_themselves(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = config_of(tmp_path, [{"text": "abcdefg"}, {"text": "h"}], text_layout=TextLayout.SEPARATE)
    stream = stream_of(TextSource, config, tokenizer, 5)
    assert everything(stream, tokenizer) == [["a[b][c][d][e]"], ["f[g][<end>]"], ["h[<end>]"]]


@pytest.mark.parametrize(
    ("kind", "row", "parts"),
    [
        (TextSource, {"text": "ab"}, ["<user>[a][b][<end>]"]),
        (LabelledSource, {"text": "ab", "label": 1}, ["<user>ab[<end>]"]),
        (LabelledSource, {"query": "q", "positive": "a", "negative": "b"}, ["<user>q\na[<end>]", "<user>q\nb[<end>]"]),
        (ContrastedSource, {"query": "q", "positive": "a"}, ["<user>q[<end>]", "<user>a[<end>]"]),
    ],
)
def test_a_text_begins_as_the_tokenizer_begins_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: type[TrainingSource], row: dict, parts: list[str]
) -> None:
    beginning = copy.deepcopy(tokenizer)
    # Puts <user>, id 2, before a text and <assistant>, id 3, behind it, in the place of what Llama's and Gemma's put.
    beginning.backend_tokenizer.post_processor = TemplateProcessing(
        single="<user> $A <assistant>", special_tokens=[("<user>", 2), ("<assistant>", 3)]
    )
    assert beginning("")["input_ids"] == [2, 3]
    stream = stream_of(kind, config_of(tmp_path, [row]), beginning)
    assert everything(stream, beginning) == [parts]


def test_a_text_file_is_one_document(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "one.txt").write_text("ab\n")
    (tmp_path / "two.txt").write_text("c")
    config = DataConfig(path=str(tmp_path), evaluation_count=0, shuffle=False)
    assert everything(stream_of(TextSource, config, tokenizer), tokenizer) == [["a[b][\n][<end>][c][<end>]"]]
    (tmp_path / "two.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="two.txt: expected text in UTF-8"):
        stream_of(TextSource, config, tokenizer)


def test_raw_text_is_read_from_a_field_that_can_be_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = config_of(tmp_path, [{"content": "ab"}], prompt_key="content")
    assert everything(stream_of(TextSource, config, tokenizer), tokenizer) == [["a[b][<end>]"]]
    with pytest.raises(DataError, match="a.jsonl:1: expected the field 'text', found content; .*data.prompt_key"):
        stream_of(TextSource, config_of(tmp_path, [{"content": "ab"}]), tokenizer)
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="has no eos_token, which must end each text"):
        stream_of(TextSource, config, bare)


def test_names_of_classes_are_numbered_in_sorted_order_and_kept_in_the_state(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": "a", "label": "ham"}, {"text": "b", "label": "spam"}, {"prompt": "c", "label": "eggs"}]
    caplog.set_level(logging.INFO)
    stream = stream_of(LabelledSource, config_of(tmp_path, rows), tokenizer)
    assert "classes: 0 eggs, 1 ham, 2 spam" in caplog.text
    state = stream.state()
    items = stream.next(3)
    assert [marked(item.parts[0], tokenizer) for item in items] == ["a[<end>]", "b[<end>]", "<user>c[<end>]"]
    batch = stream.batch(items)
    assert batch.label.tolist() == [1.0, 2.0, 0.0] and batch.group.tolist() == [0, 1, 2]
    other = stream_of(LabelledSource, config_of(tmp_path, rows, labels=["spam", "ham", "eggs"]), tokenizer)
    assert other.batch(other.next(3)).label.tolist() == [1.0, 0.0, 2.0]
    with pytest.raises(DataError, match=r"classes .* were \['eggs', 'ham', 'spam'\] and are now \['spam', 'ham', 'egg"):
        other.restore(state)


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"prompt": "q", "completion": "ab"}, {}),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "ab"}]}, {}),
        ({"question": "q", "answer": "ab"}, {}),
        ({"instruction": "q", "input": "", "output": "ab"}, {}),
        ({"prompt": "q", "said": "ab"}, {"answer_key": "said"}),
    ],
)
def test_a_prompt_is_judged_with_its_response(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, fields: dict, settings: dict
) -> None:
    config = config_of(tmp_path, [{**fields, "label": 1}], **settings)
    assert everything(stream_of(LabelledSource, config, tokenizer), tokenizer) == [
        ["<user>q<end>\n<assistant>ab[<end>]"]
    ]


@pytest.mark.parametrize("key", ["image", "image_path", "image_url", "audio_paths"])
def test_a_labelled_text_beside_an_image_is_refused(key: str) -> None:
    record = Record(fields={"text": "a", "label": 1, key: "a.png"}, source="s", where="s:1")
    with pytest.raises(DataError, match=f"s:1: expected text alone, found '{key}'"):
        LabelledSource.understand(record, DataConfig())


def test_a_prompt_whose_responses_are_judged_is_held_out_with_all_of_them() -> None:
    def prompt_text(*roles: str, **fields: str) -> str:
        turns = [{"role": role, "content": fields.get(role, role)} for role in roles]
        record = Record(fields={"messages": turns, "label": 1}, source="s", where="s:1")
        return LabelledSource.understand(record, DataConfig()).prompt_text

    first, second = (prompt_text("user", "assistant", assistant=text) for text in ("good", "bad"))
    assert first == second != prompt_text("user", "assistant", user="other")
    # A conversation of which the user's last words are judged is its own prompt.
    assert prompt_text("user", "assistant", "user") != first


def test_numbers_are_labels_as_they_are(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"text": "a", "label": 3}, {"text": "b", "label": 0.5}, {"text": "c", "label": True}]
    stream = stream_of(LabelledSource, config_of(tmp_path, rows), tokenizer)
    assert stream.batch(stream.next(3)).label.tolist() == [3.0, 0.5, 1.0]
    with pytest.raises(DataError, match="all labels to be names or all to be numbers, found both"):
        stream_of(LabelledSource, config_of(tmp_path, [*rows, {"text": "d", "label": "x"}]), tokenizer)


@pytest.mark.parametrize(
    "fields",
    [
        {"query": "q", "documents": ["yes", "no", "not"], "labels": [1, 0, 0]},
        {"query": "q", "positive": "yes", "negatives": ["no", "not"]},
    ],
)
def test_the_documents_of_a_query_are_one_item(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, fields: dict
) -> None:
    stream = stream_of(LabelledSource, config_of(tmp_path, [fields, {"text": "z", "label": 2}]), tokenizer)
    items = stream.next(2)
    texts = [marked(part, tokenizer) for part in items[0].parts]
    assert texts == ["q\nyes[<end>]", "q\nno[<end>]", "q\nnot[<end>]"]
    batch = stream.batch(items)
    assert batch.label.tolist() == [1.0, 0.0, 0.0, 2.0] and batch.group.tolist() == [0, 0, 0, 1]
    # q newline yes end, q newline no end, q newline not end: 6 + 5 + 6 = 17 tokens must lie together; z has 2.
    assert len(stream_of(LabelledSource, stream.config, tokenizer, 16)) == 1


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"text": "a"}, {}, "expected 'label' beside a text, or 'query' with 'documents' and 'labels'"),
        ({"text": "a", "label": None}, {}, "expected 'label' to be a name or a number, found None"),
        ({"text": "a", "label": "c"}, {"labels": ["a", "b"]}, "expected 'label' to be one of data.labels, a, b, found"),
        ({"query": "q", "documents": ["a"], "labels": [1, 2]}, {}, "a list of numbers, one for each of the 1 'docum"),
        ({"query": "q", "documents": ["a"], "labels": ["x"]}, {}, "expected 'labels' to be numbers"),
        ({"query": "q", "positive": "a"}, {}, "expected 'documents' with 'labels', or 'positive' and 'negative'"),
    ],
)
def test_a_record_without_a_label_is_named(fields: dict, settings: dict, message: str) -> None:
    with pytest.raises(DataError, match="s:1: .*" + message):
        LabelledSource.understand(record(**fields), DataConfig(**settings))


def test_a_query_comes_with_what_it_should_be_near_to_and_far_from(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [
        {"anchor": "q", "positive": "p", "negative": ["n", "m"]},
        {"query": "r", "pos": ["s", "t"], "neg": []},
        {"query": "long", "positive": "p" * 20},
    ]
    stream = stream_of(ContrastedSource, config_of(tmp_path, rows), tokenizer, 5)
    # `long` and its end are 5 tokens, what it should be near to is too long. Each text fits by itself.
    assert len(stream) == 3 and stream.dropped == {"query is too long": 1}
    items = stream.next(3)
    texts = [[marked(part, tokenizer) for part in item.parts] for item in items]
    assert texts[0] == ["q[<end>]", "p[<end>]", "n[<end>]", "m[<end>]"]
    assert texts[1:] == [["r[<end>]", "s[<end>]"], ["r[<end>]", "t[<end>]"]]
    batch = stream.batch(items)
    assert batch.group.tolist() == [0, 0, 0, 0, 1, 1, 2, 2] and batch.role.tolist() == [0, 1, 2, 2, 0, 1, 0, 1]


def test_texts_far_from_a_query_may_be_numbered() -> None:
    # As sentence-transformers has them. A file with columns gives a query with fewer the names of all.
    texts = {"positive": "p", "negative_10": "j", "negative_2": "b", "negative_1": "a", "negative_11": None}
    assert ContrastedSource.understand(record(anchor="q", **texts), DataConfig()).far == ("a", "b", "j")
    ranked = LabelledSource.understand(record(query="q", **texts), DataConfig())
    assert ranked.texts == ("q\np", "q\na", "q\nb", "q\nj") and ranked.labels == (1.0, 0.0, 0.0, 0.0)


def test_an_id_that_meets_the_one_of_an_item_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"id": "a", "query": "q", "pos": ["s", "t"]}, {"id": "a#1", "query": "r", "pos": "s"}]
    with pytest.raises(DataError, match="id of its own, found 'a#1' twice: .*; give that record another"):
        stream_of(ContrastedSource, config_of(tmp_path, rows), tokenizer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positive": "p"}, "expected the field 'query' or 'anchor', found positive"),
        ({"query": "q"}, "expected a text to be near to in 'positive' or 'positives' or 'pos'"),
        ({"query": "q", "positive": "p", "negative": [5]}, r"expected 'negative' to be text or a list of texts, found"),
    ],
)
def test_a_query_without_texts_is_named(fields: dict, message: str) -> None:
    with pytest.raises(DataError, match="s:1: " + message):
        ContrastedSource.understand(record(**fields), DataConfig())


def test_real_text_becomes_whole_sequences(shared_data: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = DataConfig(path=str(shared_data / "llamafactory" / "c4_demo.jsonl") + "#40")
    stream = stream_of(TextSource, config, tokenizer, 512)
    lengths = sorted(item.num_tokens for item in stream.next(len(stream)))
    assert set(lengths[1:]) == {512} and lengths[0] <= 512 and stream.held_out()


def test_a_field_that_is_null_counts_as_absent(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Files with columns give every record the fields of all."""
    texts = {"query": "q", "positive": None, "positives": ["ab"], "negatives": None, "negative": None}
    contrasted = stream_of(ContrastedSource, config_of(tmp_path, [texts]), tokenizer)
    assert everything(contrasted, tokenizer) == [["q[<end>]", "ab[<end>]"]]
    ranked = {"query": "q", "documents": None, "labels": None, "positive": "a", "negative": "b", "label": None}
    one = {"query": None, "text": "c", "label": "x"}
    labelled = LabelledSource.understand(record(**ranked), DataConfig())
    assert labelled.texts == ("q\na", "q\nb") and labelled.labels == (1.0, 0.0)
    assert LabelledSource.understand(record(**one), DataConfig()).texts == ("c",)
    said = {"text": None, "prompt": "p", "response": "r", "label": True, "kto_tag": None}
    assert [each["content"] for each in LabelledSource.understand(record(**said), DataConfig()).messages] == ["p", "r"]
    swapped = {**said, "label": None, "kto_tag": True}
    assert UnpairedSource.understand(record(**swapped), DataConfig()).desirable
    pair = {"prompt": "p", "chosen": "c", "rejected": "r", "responses": None, "scores": None}
    assert PreferenceSource.understand(record(**pair), DataConfig()).pairs == ((0, 1, 0.0),)
    several = {"prompt": "p", "responses": ["a", "b"], "scores": None, "ranks": [2, 1]}
    assert PreferenceSource.understand(record(**several), DataConfig()).pairs == ((1, 0, 0.0),)
