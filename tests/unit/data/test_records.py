import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlframe.data.config import DataConfig
from rlframe.data.records import Record, read
from rlframe.data.storage.folder import files_of
from rlframe.data.text.conversations import understand
from rlframe.utils.errors import DataError


def write(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


def test_jsonl_json_and_parquet_give_the_same_records(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    jsonl = write(tmp_path / "x.jsonl", "\n\n".join(json.dumps(row) for row in rows) + "\n")
    as_json = write(tmp_path / "x.json", json.dumps(rows))
    parquet = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    for path in (jsonl, as_json, str(parquet)):
        assert [record.fields for record in read(path, max_bytes=1e6)] == rows
    # The blank line counts.
    assert [record.where for record in read(jsonl, max_bytes=1e6)] == [f"{jsonl}:1", f"{jsonl}:3"]
    assert len(read(str(tmp_path), max_bytes=1e6)) == 6
    assert {record.source for record in read(str(tmp_path), max_bytes=1e6)} == {"x.jsonl", "x.json", "x.parquet"}


def test_an_id_is_the_records_own_or_a_hash_of_its_content_whatever_the_order_of_fields() -> None:
    def make(**fields: object) -> Record:
        return Record(fields=fields, source="", where="")

    assert make(id="seven").id == "seven"
    assert make(id=7).id == "7"
    assert make(a=1, b="x").id == make(b="x", a=1).id
    # printf '{"a":1,"b":"x"}' | sha256sum | cut -c1-16
    assert make(a=1, b="x").id == "ecf9e98ec0641e23"
    assert make(a=1, b="y").id != make(a=1, b="x").id


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "expected records, found an empty file"),
        ("a.json", " \n", "expected records, found an empty file"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": "y"\n', r"a.jsonl:2: expected one JSON object per line, found b'{"),
        ("a.jsonl", "[1]\n", r"a.jsonl:1: expected a JSON object, found list \[1\]"),
        ("a.json", '{"a": 1}\n{"a": 2}', "a.json: expected one JSON list .*name it .jsonl"),
        ("a.json", '{"a": 1}', "a.json: expected one JSON list of objects, found dict"),
        ("a.json", '[{"a": 1}, 5]', r"a.json\[1\]: expected a JSON object, found int 5"),
        ("a.jsonl", '{"a": "\\ud800"}', r"a.jsonl:1: expected text, found '\\ud800', half of a surrogate pair"),
        ("a.jsonl", '{"a": NaN}', r"a.jsonl:1: expected one JSON object per line.*NaN is no number"),
        ("a.jsonl", '{"a": -1e999}', r"a.jsonl:1: .*-1e999 is no number"),
        ("a.jsonl", '{"a": 1, "a": 2}', r"a.jsonl:1: .*it has the key 'a' twice"),
        ("a.jsonl", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", r"a.jsonl:1: .*nested too deeply"),
        ("a.jsonl", '{"a": ' + "[" * 300 + "]" * 300 + "}", r"a.jsonl:1: expected at most 200 levels"),
        (
            "a.jsonl",
            '{"a": "' + "x" * 1_000_000 + '"}',
            r"a.jsonl:1: .*at most data.max_record_mb=1 MB, found a longer",
        ),
        ("a.txt", "x" * 1_000_001, r"a.txt: .*at most data.max_record_mb=1 MB, found a longer"),
        ("a.csv", "a,b", "expected a file ending in .jsonl, .json, .parquet, .txt, found '.csv'"),
        ("a.parquet", "no parquet", "a.parquet: expected a Parquet file"),
    ],
)
def test_a_malformed_file_is_named_with_the_line_and_what_was_found(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / name, content), max_bytes=1e6)


def test_bytes_that_are_not_utf8_name_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(DataError, match="a.jsonl:2: .*utf-8"):
        read(str(tmp_path / "a.jsonl"), max_bytes=1e6)


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"gone.jsonl: expected a file, .* .data.path, data.evaluation_path or evaluation.sets.NAME.path.",
    ):
        read(str(tmp_path / "gone.jsonl"), max_bytes=1e6)
    with pytest.raises(DataError, match="expected a folder with .jsonl"):
        read(str(tmp_path), max_bytes=1e6)


def test_a_dataset_of_the_hub_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="no-such-owner/name:main: cannot be read as a Hugging Face dataset owner/name"):
        read("no-such-owner/name:main", max_bytes=1e6)


USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("fields", "messages", "answer"),
    [
        (
            {"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 1,004"},
            [USER, {"role": "assistant", "content": "2+2=<<2+2=4>>4\n#### 1,004"}],
            "1004",
        ),
        ({"prompt": "2+2?", "answer": 4}, [USER, FOUR], "4"),
        # A column of doubles; exact_match compares texts.
        ({"prompt": "2+2?", "answer": 4.0}, [USER, FOUR], "4"),
        ({"prompt": [USER], "reward_model": {"ground_truth": 4.0}}, [USER], "4"),
        ({"prompt": [USER], "reward_model": {"ground_truth": 1e300}}, [USER], "1e+300"),
        ({"prompt": "2+2?", "answer": None}, [USER], None),
        ({"prompt": "2+2?", "response": "4", "answer": "four"}, [USER, FOUR], "four"),
        ({"prompt": [USER], "completion": "4"}, [USER, FOUR], "4"),
        # TRL's conversational formats: docs/source/dataset_formats.md.
        ({"prompt": [USER]}, [USER], None),
        ({"prompt": [USER], "completion": [FOUR]}, [USER, FOUR], "4"),
        ({"prompt": [USER, FOUR, USER], "completion": [FOUR], "answer": "5"}, [USER, FOUR, USER, FOUR], "5"),
        ({"prompt": [USER], "completion": [FOUR, USER, FOUR]}, [USER, FOUR, USER, FOUR], "4"),
        ({"prompt": [USER], "reward_model": {"ground_truth": "4", "style": "rule"}}, [USER], "4"),
        # As Search-R1's: several answers are none that a reward could compare with.
        ({"prompt": [USER], "reward_model": {"ground_truth": {"target": ["4", "four"]}}}, [USER], None),
        ({"prompt": [USER], "reward_model": {"ground_truth": ["4", "four"]}}, [USER], None),
        ({"messages": [USER, FOUR]}, [USER, FOUR], "4"),
        ({"messages": [USER], "answer": "4"}, [USER, FOUR], "4"),
        ({"messages": None, "prompt": "2+2?", "response": None, "completion": "4"}, [USER, FOUR], "4"),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "system": "Add."},
            [{"role": "system", "content": "Add."}, USER, FOUR],
            "4",
        ),
        (
            {"instruction": "Add.", "input": "2 and 2", "output": "4", "history": [["Hi", "Yes?"]]},
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "Add.\n2 and 2"},
                FOUR,
            ],
            "4",
        ),
    ],
)
def test_known_shapes_are_recognised(fields: dict, messages: list[dict], answer: str | None) -> None:
    conversation = understand(Record(fields=fields, source="s", where="s:1"), DataConfig())
    assert list(conversation.messages) == messages
    assert conversation.answer == answer


def test_turns_of_a_prompt_are_not_learnt_where_the_completion_is_a_list_of_messages() -> None:
    fields = {"prompt": [USER, FOUR, USER], "completion": [FOUR, USER, {**FOUR, "weight": 0.5}]}
    config = DataConfig(system_prompt="Add.")
    found = understand(Record(fields=fields, source="s", where="s:1"), config)
    assert found.weights == (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5)
    # The policy answers the prompt itself, and is given nothing of the completion.
    assert found.prompt == found.messages[:4]
    told = {"prompt": [USER, {**FOUR, "weight": 1}, USER], "completion": [FOUR]}
    assert understand(Record(fields=told, source="s", where="s:1"), DataConfig()).weights == (0.0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({"prompt": [USER, FOUR, USER], "completion": "4"}, (0.0, 0.0, 0.0, 1.0)),
        ({"prompt": [USER, FOUR, USER], "response": "4"}, (0.0, 0.0, 0.0, 1.0)),
        ({"prompt": [USER, FOUR, USER], "answer": "4"}, (0.0, 0.0, 0.0, 1.0)),
        ({"prompt": [USER, {**FOUR, "weight": 0.5}, USER], "completion": "4"}, (0.0, 0.5, 0.0, 1.0)),
        # What is a conversation as a whole is learnt as one, and so is the history of an instruction.
        ({"prompt": [USER, FOUR, USER, FOUR], "answer": "4"}, (1.0, 1.0, 1.0, 1.0)),
        ({"messages": [USER, FOUR, USER], "answer": "4"}, (1.0, 1.0, 1.0, 1.0)),
        ({"instruction": "2+2?", "output": "4", "history": [["2+2?", "4"]]}, (1.0, 1.0, 1.0, 1.0)),
    ],
)
def test_turns_of_a_prompt_are_not_learnt_where_the_response_is_text(fields: dict, weights: tuple[float, ...]) -> None:
    assert understand(Record(fields=fields, source="s", where="s:1"), DataConfig()).weights == weights


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        ([USER], [], "expected the messages of 'completion' to begin with the assistant's, found none"),
        (
            [USER],
            [USER, FOUR],
            "begin with the assistant's, found one from 'user'; put messages before",
        ),
        ([USER, FOUR], [FOUR], r"found that both are of the assistant; put the beginning .* into completion\[0\]"),
        ([USER, FOUR], "4", "'completion' is text, found that both .* of the response into its text"),
        ([USER], ["4"], r"expected completion\[0\] to be {role, content}"),
    ],
)
def test_an_ambiguous_completion_is_refused(prompt: list, completion: list | str, message: str) -> None:
    record = Record(fields={"prompt": prompt, "completion": completion}, source="s", where="s:1")
    with pytest.raises(DataError, match=f"s:1: .*{message}"):
        understand(record, DataConfig())


def test_named_keys_win_over_recognition() -> None:
    record = Record(fields={"question": "no", "task": "2+2?", "answer": "no", "gold": 4}, source="s", where="s:1")
    conversation = understand(record, DataConfig(prompt_key="task", answer_key="gold"))
    assert list(conversation.messages) == [USER, FOUR]
    assert conversation.answer == "4"


def test_the_system_prompt_is_for_conversations_without_one() -> None:
    config = DataConfig(system_prompt="Short.")
    bare = understand(Record(fields={"prompt": "x"}, source="", where=""), config)
    own = understand(
        Record(fields={"messages": [{"role": "system", "content": "Long."}, USER]}, source="", where=""), config
    )
    assert bare.messages[0] == {"role": "system", "content": "Short."}
    assert own.messages[0] == {"role": "system", "content": "Long."}
    orca = understand(Record(fields={"system_prompt": "Orca.", "question": "x"}, source="", where=""), config)
    assert orca.messages[0] == {"role": "system", "content": "Orca."}


@pytest.mark.parametrize(
    ("fields", "config", "message"),
    [
        ({"text": "x"}, {}, "expected one of the fields messages, .*found text; .* with data.prompt_key"),
        (
            {"prompt": "x"},
            {"prompt_key": "task"},
            r"expected the field 'task' \(data.prompt_key, or .*sets.NAME.prompt_key",
        ),
        (
            {"prompt": "x"},
            {"answer_key": "gold"},
            r"expected the field 'gold' \(data.answer_key, or .*sets.NAME.answer_key",
        ),
        ({"prompt": 5}, {}, "expected 'prompt' to be text or a list of messages, found int 5"),
        ({"prompt": " "}, {}, "expected 'prompt' to be text"),
        (
            {"messages": '[{"role": "user", "content": "x"}]'},
            {},
            "expected 'messages' to be a list of messages, found text .*; if it is JSON, write what it says in its p",
        ),
        ({"prompt": "x", "answer": ["4"]}, {}, "expected 'answer' to be text or a number, found list"),
        ({"prompt": "x", "answer": True}, {}, "expected 'answer' to be text or a number, found bool True"),
        ({"messages": [{"role": "robot", "content": "x"}]}, {}, r"expected messages\[0\] to be .*found .*robot"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, {}, r"expected messages\[1\]"),
        ({"messages": [FOUR]}, {}, "expected a message from the user to answer, found turns of assistant"),
        (
            {"messages": [USER], "images": ["a.jpg"]},
            {},
            "expected text alone, found 'images', which rlframe does not read",
        ),
        # As LLaVA names it.
        (
            {"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "image": "a.jpg"},
            {},
            "expected text alone, found 'image', which rlframe does not read",
        ),
    ],
)
def test_a_record_that_cannot_be_understood_is_named(fields: dict, config: dict, message: str) -> None:
    with pytest.raises(DataError, match="train.jsonl:3: " + message):
        understand(Record(fields=fields, source="train.jsonl", where="train.jsonl:3"), DataConfig(**config))


def test_keywords_of_the_template_in_a_record_are_those_of_all_records() -> None:
    # As TRL's records have them; a file with columns adds the names of the others.
    given = {"enable_thinking": False, "tools_in_xml": [], "date": None}
    off = DataConfig(chat_template_kwargs={"enable_thinking": False})
    for fields in ({"messages": [USER, FOUR]}, {"prompt": "x"}):
        record = Record(fields={**fields, "chat_template_kwargs": given}, source="s", where="s:1")
        with pytest.raises(DataError, match="s:1: expected 'chat_template_kwargs' .* found {'enable_thinking': False}"):
            understand(record, DataConfig())
        assert understand(record, off).prompt


CONTEXT = "Ada was born in 1815."


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        # As Dolly's records have it, and those of questions about a table or a passage.
        ({"instruction": "When was she born?", "context": CONTEXT, "response": "1815"}, "context"),
        ({"question": "When was she born?", "context": CONTEXT, "answer": "1815"}, "context"),
        ({"prompt": "When was she born?", "input": CONTEXT, "output": "1815"}, "input"),
        ({"question": "And she?", "history": [["When was Byron born?", "1788"]], "response": "1815"}, "history"),
    ],
)
def test_a_part_of_the_prompt_beside_it_is_not_left_out_in_silence(fields: dict, name: str) -> None:
    record = Record(fields=fields, source="s", where="s:1")
    with pytest.raises(DataError, match=f"s:1: expected the whole prompt in .*, found '{name}' beside it, .* left out"):
        understand(record, DataConfig())
    # Who names the field says that it is the prompt, and who has written the part into it has left nothing out.
    key = next(iter(fields))
    assert understand(record, DataConfig(prompt_key=key)).prompt[0]["content"] == fields[key]
    whole = {**fields, key: f"{CONTEXT}\n{fields[key]}", "history": []}
    assert understand(Record(fields=whole, source="s", where="s:1"), DataConfig()).prompt[0]["content"] == whole[key]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        # As MMLU's records have them, ARC's, PubMedQA's and HotpotQA's.
        ("choices", ["a rock", "a bird"]),
        ("choices", {"text": ["a rock", "a bird"], "label": ["A", "B"]}),
        ("options", ["a rock", "a bird"]),
        ("context", {"contexts": ["a rock", "a bird"], "labels": None}),
        ("context", ["a rock", "a bird"]),
    ],
)
def test_a_part_of_the_prompt_that_is_no_text_is_not_left_out_in_silence(name: str, part: object) -> None:
    fields = {"question": "Which of them flies?", name: part, "answer": 1}
    with pytest.raises(DataError, match=f"the whole prompt in 'question', found '{name}' beside it, .* left out"):
        understand(Record(fields=fields, source="s", where="s:1"), DataConfig())
    # The names of fields in it need not be written.
    fields["question"] += " A: a rock. B: a bird."
    assert understand(Record(fields=fields, source="s", where="s:1"), DataConfig()).answer == "1"
    fields |= {"question": "Which of them flies?", name: None}
    assert understand(Record(fields=fields, source="s", where="s:1"), DataConfig()).answer == "1"


@pytest.mark.parametrize("name", ["alpaca_en_demo", "identity", "kto_en_demo", "dpo_en_demo"])
def test_every_record_of_the_public_demo_files_is_understood(shared_data: Path, name: str) -> None:
    for record in read(str(shared_data / "llamafactory" / f"{name}.json"), max_bytes=1e6):
        assert understand(record, DataConfig()).prompt[-1]["role"] == "user"


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '\ufeff{"a": 1}')
    write(tmp_path / "b.json", '\ufeff[{"a": 1}]')
    write(tmp_path / "c.txt", "\ufeffx")
    found = [record.fields for record in read(str(tmp_path), max_bytes=1e6)]
    assert found == [{"a": 1}, {"a": 1}, {"text": "x"}]


def test_what_is_not_read_of_a_folder_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}')
    assert len(read(str(tmp_path), max_bytes=1e6)) == 1
    assert not caplog.records
    for name in ("b.jsonl.gz", "c.csv", ".hidden"):
        (tmp_path / name).write_text("")
    (tmp_path / "train").mkdir()
    assert len(read(str(tmp_path), max_bytes=1e6)) == 1
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: b.jsonl.gz, c.csv, train are not read, only the folder's own .jsonl, .json, .parquet, .txt files"
    ]


def test_hidden_files_of_a_folder_are_not_read(tmp_path: Path) -> None:
    """A copy of an editor, or what macOS lays beside each file of a foreign disk."""
    for name, text in (("a.jsonl", '{"n": 1}'), (".b.jsonl", '{"n": 2}'), ("._a.jsonl", "\x00\x05")):
        (tmp_path / name).write_text(text)
    assert [record.fields for record in read(str(tmp_path), max_bytes=1e6)] == [{"n": 1}]
    assert [file.name for file in files_of(tmp_path)] == ["a.jsonl"]
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="files, found none"):
        read(str(tmp_path), max_bytes=1e6)
    assert len(read(str(tmp_path / ".b.jsonl"), max_bytes=1e6)) == 1


def test_links_to_the_folder_itself_are_not_followed(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).symlink_to(tmp_path)
    with pytest.raises(DataError, match="a.jsonl: expected a file, found a folder"):
        read(str(tmp_path), max_bytes=1e6)
