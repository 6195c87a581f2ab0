"""Command-line arguments on their way to Hydra."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from rlframe.config.overrides import overrides_last, rewritten
from rlframe.utils.errors import ConfigError

GROUPS = {"algorithm": ["dpo", "grpo"], "data": ["gsm8k"], "train": ["cpu", "cuda"]}


def rewrite(argument: str) -> str:
    return rewritten([argument], groups=GROUPS)[0]


@pytest.mark.parametrize(
    "argument",
    [
        "-m",
        "--cfg",
        "--config-name=x",
        "data=gsm8k",
        "hydra.verbose=true",
        "hydra/job_logging=none",
        "~train.lr",
        "+a=1",
    ],
)
def test_what_hydra_understands_by_itself_stays(argument: str) -> None:
    assert rewrite(argument) == argument


def test_overrides_may_stand_on_both_sides_of_options() -> None:
    given = ["steps=1", "-m", "seed=1,2", "--config-name", "grpo", "~reward.parts.x", "--config-dir", "a=b", "+y.z=3"]
    expected = [
        "-m",
        "--config-name",
        "grpo",
        "--config-dir",
        "a=b",
        "steps=1",
        "seed=1,2",
        "~reward.parts.x",
        "+y.z=3",
    ]
    assert overrides_last(given) == expected
    assert overrides_last(["-sc", "install=bash"]) == ["-sc", "install=bash"]


def test_a_key_needs_no_mention_in_any_file() -> None:
    assert rewrite("train.optimizer.lr=1e-4") == "++train.optimizer.lr=1e-4"
    assert rewrite("steps=3") == "++steps=3"


def test_the_learning_rate_has_a_short_key_that_must_not_stand_beside_the_whole_one() -> None:
    assert rewrite("train.lr=1e-6,3e-6") == "++train.optimizer.lr=1e-6,3e-6"
    for whole in ("train.optimizer.lr=1", "++train.optimizer.lr=1"):
        with pytest.raises(
            ConfigError, match="train.lr must not be combined with train.optimizer.lr, for which it is a shorthand"
        ):
            rewritten(["train.lr=1", whole], groups=GROUPS)


@pytest.mark.parametrize(
    "value",
    [
        "d1p4t2c2|ffn:d1p4t1e4",
        "folder/train.jsonl#500",
        "folder/reward.py:judge",
        "10.0.0.1:6379",
        "a=b",
        "~/data",
        "it's",
        "\\'",
        "ends with \\",
        "<think>(x) & y;",
        "Qwen/Qwen3-0.6B",
    ],
)
def test_a_value_arrives_as_it_was_typed(value: str) -> None:
    override = OverridesParser.create().parse_override(rewrite(f"data.path={value}"))
    assert override.value() == value


def test_items_of_a_list_are_quoted_one_by_one() -> None:
    override = OverridesParser.create().parse_override(rewrite("rollout.stop=[</s>,#5]"))
    assert override.value() == ["</s>", "#5"]
    override = OverridesParser.create().parse_override(rewrite("rollout.stop=[ </answer>, </tool> ]"))
    assert override.value() == ["</answer>", "</tool>"]


def test_a_sweep_stays_a_sweep() -> None:
    assert OverridesParser.create().parse_override(rewrite("seed=1,2")).is_sweep_override()
    assert OverridesParser.create().parse_override(rewrite("train.parallel=d1t2,d2")).is_sweep_override()


@pytest.mark.parametrize(
    ("argument", "fault"),
    [
        ("train=null", "train must name a file of configs/train: cpu, cuda, got 'null'; ~train removes the group"),
        ("train=5", "train must name a file of configs/train: cpu, cuda, got '5'; ~train removes the group"),
        ("train=", "train must name a file of configs/train: cpu, cuda, got ''; ~train removes the group"),
        ("=5", "'=5' must be key=value with a dotted key, such as train.dtype=float32"),
        ("", "'' must be key=value with a dotted key, such as train.dtype=float32"),
        ("--steps=3", "'--steps=3' must have no dashes; write 'steps=3'"),
        ("-seed=3", "'-seed=3' must have no dashes; write 'seed=3'"),
        ("a..b=1", "'a..b=1' must be key=value with a dotted key, such as train.dtype=float32"),
        (
            "seed=" + "[" * 100_000,
            f"seed must have at most 50 nested brackets, got 100000: '{59 * '['}... (100002 characters)",
        ),
    ],
)
def test_what_hydra_would_break_on_is_refused(argument: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rewrite(argument)
    assert list(map(str, caught.value.faults)) == [fault]


def test_options_with_their_values_are_left_to_hydra() -> None:
    options = ["--info=all", "--config-d=x", "-cn=grpo"]
    assert rewritten(options, groups={}) == options


def test_words_that_set_nothing_are_refused_together() -> None:
    arguments = ["--config-name", "grpo", "--cfg", "job", "--info", "all", "steps", "3", "~evaluation", "seed:3"]
    with pytest.raises(ConfigError) as caught:
        rewritten(arguments, groups={})
    rule = "must be key=value, such as steps=3"
    assert list(map(str, caught.value.faults)) == [f"'{word}' {rule}" for word in ("steps", "3", "seed:3")]


@pytest.mark.parametrize("argument", ["logging.tags.x=1", "+logging.tags.x.y=1", "~logging.tags.0"])
def test_a_key_inside_of_a_list_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rewritten([argument, "logging.tags=[a,b]"], groups={})
    key = argument.strip("+~").partition("=")[0]
    assert [str(fault) for fault in caught.value.faults] == [
        f"{key} must not be combined with logging.tags=[a,b], because a list has no keys, got {argument}; "
        "write the whole list as logging.tags=[...]"
    ]


def test_an_item_of_a_list_may_be_given_by_its_place() -> None:
    arguments = ["logging.tags=[a]", "logging.tags.0=b", "logging.tagsx.y=1"]
    assert rewritten(arguments, groups={}) == [f"++{argument}" for argument in arguments]


def test_files_of_a_group_may_be_swept() -> None:
    assert [rewrite(argument) for argument in ("train=cpu,cuda", "train=glob(c*)")] == [
        "train=cpu,cuda",
        "train=glob(c*)",
    ]


def test_a_number_with_more_digits_than_python_reads_is_text() -> None:
    assert rewrite("seed=" + "1" * 5000) == "++seed='" + "1" * 5000 + "'"
