"""A chat template of one's own is judged before anything starts."""

import json
from pathlib import Path

import pytest

from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.run.check import check_data
from rlframe.run.load import load

OTHER = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|user|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Ends turns with <|user|>, at which the embedded model does not stop."""


def refusals(*settings: str, config: str = "grpo_qwen3_moe") -> list[str]:
    return [str(fault) for fault in check_data(load(config, ["data.path=arithmetic#5", *settings]))]


@pytest.fixture
def template(tmp_path: Path) -> str:
    file = tmp_path / "other.jinja"
    file.write_text(OTHER)
    return f"data.chat_template={file}"


def test_engines_must_stop_where_the_template_ends_turns(template: str) -> None:
    (told,) = refusals(template)
    assert told.startswith("rollout.stop must hold '<|user|>', with which data.chat_template=")
    assert """engines stop at <|end|>; set rollout.stop='["<|user|>"]', or add its id""" in told
    assert refusals(template, 'rollout.stop=["<|user|>"]') == []
    # Nothing is sampled.
    assert refusals(template, config="sft_qwen3_moe_tiny") == []


def test_a_name_that_is_none_and_a_default_that_does_not_fit_are_refused() -> None:
    (told,) = refusals("data.chat_template=chatlm")
    assert told == "data.chat_template must be a file, or one of chatml, plain, got 'chatlm': there is no such file"
    (told,) = refusals("data.chat_template=chatml")
    assert told.startswith("data.chat_template cannot be chatml with the tokenizer ") and "; use plain, " in told
    assert refusals("data.chat_template=plain") == []


def test_a_base_model_is_refused_with_the_default_to_ask_for(tmp_path: Path) -> None:
    for file in resolve(ModelConfig(path="qwen3_moe_tiny")).iterdir():
        if file.suffix in (".json", ".safetensors"):
            (tmp_path / file.name).symlink_to(file)
    settings = tmp_path / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(settings.read_text()).items() if key != "chat_template"}
    settings.unlink()
    settings.write_text(json.dumps(kept))
    (told,) = refusals(f"model.path={tmp_path}")
    assert (
        "has no chat template, as those of base models; use a model that has one, or set data.chat_template=plain"
        in told
    )
    assert refusals(f"model.path={tmp_path}", "data.chat_template=plain") == []


def test_what_does_nothing_is_refused(template: str) -> None:
    (told,) = refusals(template, "algorithm.data=texts", config="sft_qwen3_moe_tiny")[:1]
    assert "data.chat_template has no effect" in told


@pytest.mark.parametrize("asked", ["{{ m.content }}", ""])
def test_the_users_message_is_looked_for_and_no_result_of_a_tool(tmp_path: Path, asked: str) -> None:
    # As Llama's and gpt-oss', it writes what a tool returns as JSON, and so not as it stands in the record.
    template = tmp_path / "other.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'tool' %}{{ m.content | tojson }}{% elif "
        "m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% elif m.role == 'user' %}"
        + asked
        + "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "read", "arguments": {"of": "x"}}}
    messages = [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "read", "content": '{"celsius": 3}'},
        {"role": "assistant", "content": "3 degrees"},
    ]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    settings = [f"data.path={file}", "data.evaluation_count=0", f"data.chat_template={template}"]
    told = refusals(*settings, config="sft_qwen3_moe_tiny_tools")
    assert told == [] if asked else "leaves out the user's message 'How warm is it?'" in told[0]
