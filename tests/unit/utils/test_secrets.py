"""Passwords, tokens and keys do not reach files, logs and messages."""

import pytest

from rlframe.utils.secrets import hidden, without_secret, without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ann:pa55@mlflow.example/x", "https://***@mlflow.example/x"),
        ("s3://bucket/x?X-Amz-Signature=abc&b=1", "s3://bucket/x?X-Amz-Signature=***&b=1"),
        ("wrong: hf_abcdefghijklmnopqrst, got", "wrong: ***, got"),
        ("sk-proj-0123456789abcdef", "***"),
        ("mail ann@example.org about https://example.org/a@b", "mail ann@example.org about https://example.org/a@b"),
        ("max_tokens=8", "max_tokens=8"),
    ],
)
def test_a_secret_in_a_text_is_hidden(text: str, shown: str) -> None:
    assert hidden(text) == shown


def test_what_the_environment_calls_secret_is_hidden_everywhere(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse")
    monkeypatch.setenv("SHORT_TOKEN", "the")
    assert hidden("the key 0123456789 of correct horse") == "the key *** of ***"


def test_settings_named_like_secrets_are_hidden_and_others_stay() -> None:
    values = {
        "api_key": "abc",
        "hf_token": "abc",
        "eos_token": "<end>",
        "experts_per_token": 2,
        "max_tokens": 8,
        "password": None,
        "DB_PASSWORD": 12345678,
        "with_token": True,
        "nested": {"https://a:b@c/d": [1, "https://a:b@c/d"]},
    }
    assert without_secrets(values) == {
        "api_key": "***",
        "hf_token": "***",
        "eos_token": "<end>",
        "experts_per_token": 2,
        "max_tokens": 8,
        "password": None,
        "DB_PASSWORD": "***",
        "with_token": True,
        "nested": {"https://***@c/d": [1, "https://***@c/d"]},
    }


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("cluster.runtime_env.env_vars.MY_PASSWORD=a,b", "cluster.runtime_env.env_vars.MY_PASSWORD=***"),
        ("++judge.api_key='a=b'", "++judge.api_key=***"),
        ("env_vars={HF_TOKEN:abc,NCCL_DEBUG:INFO}", "env_vars={HF_TOKEN:***,NCCL_DEBUG:INFO}"),
        ("""env_vars={A: {'MY_SECRET': 'x, y}'}, B: c}""", """env_vars={A: {'MY_SECRET': ***}, B: c}"""),
        ("judge.api_key=null", "judge.api_key=null"),
        ("rollout.max_tokens=8", "rollout.max_tokens=8"),
        ("~judge.api_key", "~judge.api_key"),
        ("x.url=https://ann:pa55@host:80/a", "x.url=https://***@host:80/a"),
    ],
)
def test_an_override_of_a_setting_named_like_a_secret_is_hidden(written: str, shown: str) -> None:
    assert without_secret(written) == shown
    assert without_secret(shown) == shown
