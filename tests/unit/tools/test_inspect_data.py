"""What a run will train on, printed with the embedded model's tokenizer."""

import json
from pathlib import Path

import pytest

from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.run.load import load
from rlframe.tools.inspect_data import histogram, main, report, side_by_side


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows(folder: Path, *fields: dict) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in fields))
    return f"data.path={file}"


def test_samples_are_marked_where_they_are_learnt_and_what_was_left_out_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path, {"prompt": "1+1=", "answer": "2", "id": "a"}, {"prompt": "1+1=", "answer": "2", "id": "a"})
    assert main(["--config-name", "sft_qwen3_moe_tiny", data, "data.evaluation_count=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("rows.jsonl: 1 examples to train on, 0 held out")
    # user 1 + 1 = end assistant, then 2 and the token that ends the turn
    assert lines[1] == "2 of 9 tokens are learned, between [[ and ]]"
    assert lines[4] == "<|user|>1+1=<|end|><|assistant|>[[2<|end|>]]"
    assert lines[-2:] == ["left out:", "       1  duplicate id"]


def test_of_a_streamed_dataset_the_first_window_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(tmp_path, *({"prompt": f"{index}=", "answer": "1"} for index in range(5)))
    streamed = ["data.streaming=true", "data.shuffle_buffer=2"]
    assert main(["--config-name", "sft_qwen3_moe_tiny", data, *streamed]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("rows.jsonl: 2 examples to train on in its first 2 records, 0 held out")


@pytest.mark.parametrize("config", ["sft_qwen3_moe_tiny", "grpo_qwen3_moe"])
def test_of_datasets_with_weights_each_record_is_shown_once(tmp_path: Path, config: str) -> None:
    for name, count in (("few", 2), ("many", 8)):
        (tmp_path / name).mkdir()
        rows(
            tmp_path / name,
            *({"prompt": f"{name} {index}" + "=" * 30 * (count == 8), "answer": "1"} for index in range(count)),
        )
    paths = [f"{tmp_path / name / 'rows.jsonl'}: {weight}" for name, weight in (("few", 3), ("many", 1))]
    run = load(config, [f"data.path={{{', '.join(paths)}}}", "data.evaluation_count=0"])
    lines = list(report(run, colours=False, width=103))
    assert " 10 " in lines[0]
    # By their shares three of four would be short.
    counted = [line.split() for line in lines if line.endswith("#")]
    assert int(counted[0][3]) == 2 and sum(int(each[3]) for each in counted) == 10


def test_prompts_of_all_stages_of_a_curriculum_are_counted_once(tmp_path: Path) -> None:
    easy, hard = (
        {"prompt": text, "answer": "1", "level": level} for text, level in (("1=", "easy"), ("12+34=", "hard"))
    )
    stages = ["data.curriculum.by=stage", "data.curriculum.field=level", "data.curriculum.stages={easy: 1, hard: 9}"]
    run = load("grpo_qwen3_moe", [rows(tmp_path, easy, hard), "data.evaluation_count=0", *stages])
    lines = list(report(run, colours=False, width=103))
    assert lines[0].endswith("2 prompts to train on, 0 held out")
    assert [line for line in lines if line.startswith("<|user|>")] == [
        "<|user|>1=<|end|><|assistant|>", "<|user|>12+34=<|end|><|assistant|>",
    ]  # fmt: skip


def test_a_pair_stands_side_by_side_and_a_terminal_gets_colours(tmp_path: Path) -> None:
    data = rows(tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5})
    run = load("sft_qwen3_moe_tiny", ["algorithm=dpo", data, "data.evaluation_count=0"])
    lines = list(report(run, colours=False, width=103))
    left, right = "<|user|>1+1=<|end|><|assistant|>[[2<|end|>]]", "<|user|>1+1=<|end|><|assistant|>[[3<|end|>]]"
    assert lines[4:6] == [f"{'chosen, margin 0.5':<50} | rejected", f"{left:<50} | {right}"]
    coloured = list(report(run, colours=True, width=103))[5]
    assert "\x1b[32m2<|end|>\x1b[0m" in coloured and "[[" not in coloured
    # Colours take no room: both columns begin where they do without.
    assert coloured.replace("\x1b[32m", "").replace("\x1b[0m", "").index(" | ") == 50


def test_columns_wrap_at_their_width_and_never_end_early() -> None:
    columns = [("a", [("1234567", False), ("89", True)]), ("b", [("x\ny", False)])]
    # Half of 13 without the bar is 5: 12345, then 67 leaves 3, too few for a mark of 4; 8 and 9 alone fill 5 each.
    assert list(side_by_side(columns, colours=False, width=13)) == [
        "a     | b",
        "12345 | x",
        "67    | y",
        "[[8]] |",
        "[[9]] |",
    ]


def test_lengths_are_counted_in_classes_of_equal_width() -> None:
    # 1 to 20 in steps of 2: 1, 1 and 2 in the first, 20 in the last.
    lines = list(histogram([1, 1, 2, 20]))
    assert lines[0] == "tokens of a sample: 1 to 20, 6.0 on average"
    assert lines[1].split() == ["1", "to", "2", "3", "#" * 40] and lines[-1].split() == [
        "19",
        "to",
        "20",
        "1",
        "#" * 14,
    ]


def test_online_prompts_are_shown_with_their_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "grpo_qwen3_moe", "data.path=arithmetic#5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "arithmetic#5: 5 prompts to train on, 256 held out"
    assert lines[4].startswith("answer '") and lines[5].endswith("=<|end|><|assistant|>")


def with_template(folder: Path, template: str) -> str:
    """The embedded model, but for its weights, with another chat template; as a setting."""
    model = folder / "model"
    model.mkdir()
    for file in resolve(ModelConfig(path="qwen3_moe_tiny")).iterdir():
        if file.suffix in (".json", ".jinja"):
            (model / file.name).write_bytes(file.read_bytes())
    (model / "chat_template.jinja").write_text(template)
    return f"model.path={model}"


def test_calls_of_tools_are_shown_as_learnt_and_their_results_as_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Marks end and begin again where a line is wrapped.
    monkeypatch.setenv("COLUMNS", "200")
    model = with_template(
        tmp_path,
        "{% for tool in tools or [] %}<|system|>{{ tool.function.name }}<|end|>{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    )
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    data = rows(tmp_path, {"messages": turns, "tools": [{"name": "add"}]})
    assert main(["--config-name", "sft_qwen3_moe_tiny", data, "data.evaluation_count=0", model]) == 0
    shown = '<|system|>add<|end|><|user|>q<|end|><|assistant|>[[{"name": "add", "arguments": {"a": 1}}<|end|>]]'
    assert shown in capsys.readouterr().out


def test_a_conversation_that_the_template_rewrites_is_shown_as_the_sequences_it_becomes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_template(
        tmp_path,
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    )
    talk = [{"role": role, "content": str(digit)} for digit, role in enumerate(("user", "assistant") * 2)]
    arguments = [rows(tmp_path, {"messages": talk}), "data.evaluation_count=0", "data.shuffle=false", model]
    assert main(["--config-name", "sft_qwen3_moe_tiny", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "1 conversations, whose earlier turns the chat template rewrites, are 2 sequences"
    assert lines[5] == "<|user|>0<|end|><|assistant|>[[1<|end|>]]"
    assert lines[8] == "<|user|>0<|end|><|assistant|><|end|><|user|>2<|end|><|assistant|>[[3<|end|>]]"


def test_a_template_that_opens_a_turn_otherwise_than_it_writes_it_ends_with_status_1_and_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_template(
        tmp_path,
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>0{% endif %}",
    )
    arguments = [rows(tmp_path, {"prompt": "0", "answer": "1"}), "data.evaluation_count=0", model]
    assert main(["--config-name", "sft_qwen3_moe_tiny", *arguments]) == 1
    # user 0 end assistant, and the fifth token is 0 in one and 1 in the other.
    assert "rows.jsonl:1: the chat template opens a turn " in (told := capsys.readouterr().err)
    assert "at token 4" in told


def test_what_reads_like_a_special_token_and_is_text_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "<|end|> or <|end|>", "answer": "1"}\n')
    arguments = ["--config-name", "grpo_qwen3_moe", f"data.path={file}", "data.max_prompt_tokens=64"]
    line = "'<|end|>' occurs 2 times in the texts of records, as text and not as the special token"
    assert main(arguments) == 0
    assert line in capsys.readouterr().out
    assert main([*arguments, "data.special_tokens_in_text=true"]) == 0
    assert line not in capsys.readouterr().out
