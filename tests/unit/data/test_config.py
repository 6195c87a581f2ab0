import subprocess
import sys

import pytest

from rlframe.data.config import DataConfig, split_count


def test_a_count_suffix_is_split_off() -> None:
    assert split_count("a/b.jsonl#500") == ("a/b.jsonl", 500)
    assert split_count("a#b.jsonl") == ("a#b.jsonl", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": ""}, "path must name a dataset"),
        ({"path": "x.jsonl#0"}, "path must keep at least 1 record, got 'x.jsonl#0'"),
        ({"evaluation_path": "y.jsonl#5"}, "use evaluation_count"),
        ({"evaluation_path": "y.jsonl", "evaluation_count": 0}, "evaluation_count must be above 0"),
        ({"evaluation_count": -1}, "evaluation_count must be at least 0"),
        ({"shuffle_buffer": 5}, "shuffle_buffer has no effect without streaming=true, got 5"),
        ({"streaming": True, "shuffle_buffer": 0}, "shuffle_buffer must be at least 1, got 0"),
        ({"streaming": True, "path": ["a.jsonl", "b.jsonl#5"]}, "path must not carry a count with streaming=true, got"),
        ({"streaming": True, "evaluation_count": 7}, "evaluation_count has no effect with streaming=true and no"),
        ({"streaming": True, "cache_folder": None}, "cache_folder has no effect with streaming=true, got null"),
        ({"cache_gb": 0}, "cache_gb must be above 0 .cache_folder=null keeps nothing., got 0"),
        ({"cache_gb": 1, "cache_folder": None}, "cache_gb has no effect with cache_folder=null, got 1"),
        ({"cache_gb": 1, "streaming": True}, "cache_gb has no effect with streaming=true, got 1"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


def test_the_configs_are_light() -> None:
    code = (
        "import sys, rlframe.data.config, rlframe.rewards.config; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray', 'math_verify')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
