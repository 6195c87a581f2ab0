"""Composition of the shipped configs with overrides."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hydra
import pytest

from rlframe.algorithms.sft import SftConfig
from rlframe.config.entries import deletions
from rlframe.config.load import command_line
from rlframe.megatron.config.parallel import Parallel
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError


def test_an_override_reaches_a_key_that_no_file_mentions() -> None:
    run = load("grpo_qwen3_moe", ["train.optimizer.warmup_steps=7", "checkpoint.every_steps=2", "seed=5"])
    assert (run.train.optimizer.warmup_steps, run.checkpoint.every_steps, run.seed) == (7, 2, 5)


def test_a_layout_needs_no_quotes_beyond_the_shell() -> None:
    layout = "d1p4t2c2|ffn:d1p4t1e4"
    assert load("grpo_qwen3_moe", [f"train.parallel={layout}"]).train.parallel == layout


def test_a_group_is_chosen_by_name() -> None:
    assert isinstance(load("grpo_qwen3_moe", ["algorithm=sft"]).algorithm, SftConfig)


@pytest.mark.parametrize("argument", ["x=1", "+x.y=1", "~0", "2=c", "+2=c"])
def test_a_key_inside_of_a_list_of_the_files_is_refused(tmp_path: Path, argument: str) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [grpo_qwen3_moe, _self_]\nrollout: {stop: [a, b]}\n")
    word = re.sub(r"^([+~]?)", r"\1rollout.stop.", argument)
    key = word.strip("+~").partition("=")[0]
    expected = (
        f"{key} must be the place of an item of rollout.stop, which the files give as a list of 2, got {word}; "
        "write the whole list as rollout.stop=[...]"
    )
    for compose in (
        lambda: load("mine", [word], config_dir=str(tmp_path)),
        lambda: command_line(["--config-dir", str(tmp_path), "--config-name", "mine", word], default_name=""),
    ):
        with pytest.raises(ConfigError) as caught:
            compose()
        assert [str(fault) for fault in caught.value.faults] == [expected]
    assert load("mine", ["rollout.stop.1=c"], config_dir=str(tmp_path)).rollout.stop == ["a", "c"]


@pytest.mark.parametrize(
    ("of_file", "argument", "expected"),
    [
        ("{a.jsonl: 1, b.jsonl: 2}", "data.path=[c.jsonl,d.jsonl]", ["c.jsonl", "d.jsonl"]),
        ("{a.jsonl: 1, b.jsonl: 2}", "++data.path=[c.jsonl]", ["c.jsonl"]),
        ("[a.jsonl, b.jsonl]", "data.path={c: 1, d: 2}", {"c": 1.0, "d": 2.0}),
        ("[a.jsonl, b.jsonl]", "data.path=[c.jsonl]", ["c.jsonl"]),
        ("{a.jsonl: 1, b.jsonl: 2}", "data.path={c.jsonl: 3}", {"c.jsonl": 3.0}),
        ("{a.jsonl: 1, b.jsonl: 2}", "+data.path={c.jsonl: 3}", {"a.jsonl": 1.0, "b.jsonl": 2.0, "c.jsonl": 3.0}),
        ("{a.jsonl: 1, b.jsonl: 2}", "~data.path +data.path=[c.jsonl]", ["c.jsonl"]),
        ("{a.jsonl: 1, b.jsonl: 2}", "~data.path data.path={c.jsonl: 3}", {"c.jsonl": 3.0}),
        ("a.jsonl", "data.path={c.jsonl: 3}", {"c.jsonl": 3.0}),
    ],
)
def test_data_of_the_command_line_take_the_place_of_those_of_the_files_in_any_form(
    tmp_path: Path, of_file: str, argument: str, expected: object
) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [grpo_qwen3_moe, _self_]\ndata: {{path: {of_file}}}\n")
    words = re.split(r" (?=\+|data)", argument)
    assert load("mine", [*words, "steps=3"], config_dir=str(tmp_path)).data.path == expected


def test_what_the_critic_leaves_out_is_as_in_train() -> None:
    run = load("grpo_qwen3_moe", ["algorithm=ppo", "train.optimizer.beta1=0.8"])
    assert run.critic.train is None and run.critic_train is run.train and run.critic_model is run.model
    own = ["critic.train.optimizer.lr=7e-3", "critic.train.num_minibatches=2", "critic.model.path=elsewhere"]
    run = load("grpo_qwen3_moe", ["algorithm=ppo", "train.optimizer.beta1=0.8", *own])
    theirs, ours = run.critic_train, run.train
    assert (theirs.optimizer.lr, theirs.num_minibatches, run.critic_model.path) == (7e-3, 2, "elsewhere")
    assert (ours.optimizer.lr, ours.num_minibatches) == (5e-4, 1)
    assert theirs.optimizer.beta1 == 0.8 and theirs.dtype == ours.dtype and theirs.parallel == ours.parallel


def test_a_critics_layout_is_its_own_whole() -> None:
    layouts = ["train.parallel={tp:2,dp:2}", "critic.train.parallel={pp:2}"]
    parallel = Parallel.parse(load("grpo_qwen3_moe", ["algorithm=ppo", *layouts]).critic_train.parallel)
    assert (parallel.tp, parallel.pp) == (1, 2)


def test_name_and_output_follow_the_config_and_each_other() -> None:
    assert load("grpo_qwen3_moe").output == "outputs/grpo_qwen3_moe"
    assert load("grpo_qwen3_moe", ["name=mine"]).output == "outputs/mine"
    assert load("grpo_qwen3_moe", ["name=mine", "output=there"]).output == "there"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.optimzer.lr=1", "train.optimzer.lr is not a key; did you mean train.optimizer.lr?"),
        ("train.paralel=d1", "train.paralel is not a key; did you mean train.parallel?"),
        ("algorithm.groupsize=4", "algorithm.groupsize is not a key; did you mean algorithm.group_size?"),
        ("rollout.environment=single_turn", "rollout.environment is not a key; did you mean environment.name?"),
        ("rollout.max_token=4", "rollout.max_token is not a key; did you mean rollout.max_tokens?"),
        ("algorithm.name=gpro", "algorithm.name must be one of cispo, classification, "),
        ("algorithm.group_size=1", "algorithm.group_size must be at least 2 for grpo, got 1"),
        ("train.optimizer.lr=fast", "train.optimizer.lr must be a number, got 'fast'"),
        ("reward=exactmatch", "reward must name a file of configs/reward: exact_match, "),
        ("reward=exactmatch", "got 'exactmatch'; did you mean exact_match?"),
        ("algorithm=grpo,grp0", "got 'grp0'; did you mean grpo?"),
        ("reward=my.py:score", "got 'my.py:score'; write reward.parts.NAME.name=my.py:score"),
        ("algorithm=kinder.algos:Mine", "got 'kinder.algos:Mine'; write algorithm.name=kinder.algos:Mine"),
        ("reward=[math,mth_length]", "got 'mth_length'; did you mean math_length?"),
        ("reward.parts=[a.py:f]", "reward.parts must be a section of named entries, got ['a.py:f']"),
        ("algorithm.name=gpro", "or path/to/file.py:NAME or package.module:NAME, got 'gpro'; did you mean grpo?"),
        ("algorithm.name=kinder.algos.Mine", "got 'kinder.algos.Mine'; did you mean kinder.algos:Mine?"),
        ("algorithm.name=kinder/algos.py", "got 'kinder/algos.py'; did you mean kinder/algos.py:NAME?"),
        ("algorithm.name=kinder/algos.py/Mine", "did you mean kinder/algos.py:Mine?"),
        ("weight_sync.transport=ncl", "got 'ncl'; did you mean nccl?"),
        ("rendering.tool_calls=hermez", "got hermez; did you mean hermes?"),
        ("algorithm.normalize_by=group-std", "got 'group-std'; did you mean group_std?"),
    ],
)
def test_a_fault_is_reported_by_its_key(override: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("grpo_qwen3_moe", [override])
    assert len(caught.value.faults) == 1 and part in str(caught.value.faults[0])


def test_an_unknown_config_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"got 'grpo_qwen3_mo'; did you mean grpo_qwen3_moe\?"):
        load("grpo_qwen3_mo")


@pytest.mark.parametrize("name", ["{folder}/mine.yaml", "{folder}/mine", "./mine", "mine.yaml"])
def test_a_path_in_the_place_of_a_name_is_refused_with_what_to_write(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_configs(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"write --config-dir \S+ --config-name mine$"):
        load(name.format(folder=tmp_path))


def own_configs(folder: Path) -> Path:
    """A folder of a user's YAML files, with a run that inherits a shipped one, and a choice of its own."""
    (folder / "data").mkdir()
    (folder / "data/mine.yaml").write_text("path: mine.jsonl\n")
    (folder / "mine.yaml").write_text("defaults: [grpo_qwen3_moe, override data: mine, _self_]\nsteps: 3\n")
    return folder


def test_ones_own_folder_comes_before_the_package_and_builds_on_it(tmp_path: Path) -> None:
    folder = own_configs(tmp_path)
    run = load("mine", ["seed=4"], config_dir=str(folder))
    assert (run.name, run.data.path, run.steps, run.seed, run.algorithm.name) == ("mine", "mine.jsonl", 3, 4, "grpo")
    assert load("grpo_qwen3_moe", ["data=mine"], config_dir=str(folder)).data.path == "mine.jsonl"
    (folder / "data/multiplication.yaml").write_text("path: other.jsonl\n")
    assert load("grpo_qwen3_moe", ["data=multiplication"], config_dir=str(folder)).data.path == "other.jsonl"
    (folder / "grpo_qwen3_moe.yaml").write_text("defaults: [base, algorithm: sft, _self_]\n")
    assert isinstance(load("grpo_qwen3_moe", config_dir=str(folder)).algorithm, SftConfig)
    (folder / "grpo_qwen3_moe.yaml").write_text("defaults: [grpo_qwen3_moe, _self_]\n")
    with pytest.raises(ConfigError, match="defaults must not lead back .* give your file a name of its own$"):
        load("grpo_qwen3_moe", config_dir=str(folder))


def test_ones_own_folder_may_be_named_by_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(own_configs(tmp_path).parent))
    given = [f"--config-dir=~/{tmp_path.name}", "--config-name", "mine"]
    assert command_line(given, default_name="") == [f"--config-dir={tmp_path}", *given[1:]]


def test_a_program_of_hydra_s_own_and_its_threads_load(tmp_path: Path) -> None:
    with (
        hydra.initialize_config_dir(version_base="1.3", config_dir=str(own_configs(tmp_path))),
        ThreadPoolExecutor() as pool,
    ):
        loaded = pool.map(lambda seed: load("grpo_qwen3_moe", [f"seed={seed}"]).seed, range(6))
        assert list(loaded) == list(range(6))
        assert hydra.compose("data/mine").data.path == "mine.jsonl", "the program's Hydra is as it was"


@pytest.mark.parametrize(
    ("override", "hint"), [("~reward", "write ~reward.parts"), ("reward=math", r"write \+reward=math")]
)
def test_a_group_that_a_file_does_not_choose_is_told_by_what_to_write(override: str, hint: str, tmp_path: Path) -> None:
    own = "defaults: [base, _self_]\nreward: {parts: {mine: {name: exact_match}}}\n"
    (tmp_path / "mine.yaml").write_text(own)
    with pytest.raises(ConfigError, match=f"defaults choose no file of configs/reward; {hint}$"):
        load("mine", [override], config_dir=str(tmp_path))


def test_a_run_in_a_folder_of_ones_own_folder_needs_hydra_s_line(tmp_path: Path) -> None:
    file = own_configs(tmp_path) / "runs/first.yaml"
    file.parent.mkdir()
    text = "defaults: [/grpo_qwen3_moe, override /data: mine, _self_]\nsteps: 3\n"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"must name a file that has the line .*begin .*/runs/first\.yaml with it$"):
        load("runs/first", config_dir=str(tmp_path))
    file.write_text(f"# @package _global_\n{text}")
    run = load("runs/first", config_dir=str(tmp_path))
    assert (run.steps, run.data.path, run.output) == (3, "mine.jsonl", "outputs/runs/first")


def test_names_of_ones_own_folder_are_suggested(tmp_path: Path) -> None:
    folder = str(own_configs(tmp_path))
    with pytest.raises(ConfigError, match=r"got 'mime'; did you mean mine\?"):
        load("mine", ["data=mime"], config_dir=folder)
    with pytest.raises(ConfigError, match="--config-dir must be a folder, got .*/nowhere"):
        load("mine", config_dir=f"{folder}/nowhere")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("defaults: [base, algorithm: grp0]\n", "algorithm must name a file of configs/algorithm: .*did you mean grpo"),
        ("defaults: [base\n", "while parsing a flow sequence"),
    ],
)
def test_a_fault_in_ones_own_file_is_a_sentence(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){part}"):
        load("mine", config_dir=str(tmp_path))


def test_a_setting_that_was_renamed_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError) as caught:
        load("grpo_qwen3_moe", ["train.minibatches=2", "train.epochs=2", "weight_sync.transport=stream"])
    with pytest.raises(ConfigError, match="arithmetic_judged.*its name is now arithmetic_unpaired"):
        load("kto_qwen3_moe_tiny", ["data.path=arithmetic_judged"])
    said = str(caught.value)
    assert "train.minibatches is now train.num_minibatches" in said
    assert "train.epochs is now train.epochs_per_batch" in said
    assert "weight_sync.transport must be one of auto, " in said and "it was renamed to reload" in said


@pytest.mark.parametrize(
    ("overrides", "gone"),
    [
        (["reward.parts.mine.name=length"], ["math", "format"]),
        (["reward.parts.mine={name: length, weight: 2}"], ["math", "format"]),
        (["reward.parts={mine: {name: length}}"], ["math", "format"]),
        (["+reward.parts.mine.name=length"], []),
        (["++reward.parts.mine.name=length"], []),
        (["reward.parts.mine.name=length", "+reward.parts.other.name=length"], ["math", "format"]),
        (["reward.parts.mine.name=length", "reward.parts.math.weight=0.5"], ["format"]),
        (["reward.parts.math.name=length"], ["format"]),
        (["reward.parts.math.weight=0.5"], []),
        (["reward.parts.format=null"], []),
        (["~reward.parts.format", "reward.parts.mine.name=length"], ["math"]),
        (["reward=exact_match", "reward.parts.mine.name=length"], []),
        (["reward.workers=3", "steps=1"], []),
        (["~reward", "reward.parts.mine.name=length"], []),
        (["~reward.parts", "reward.parts.mine.name=length"], []),
    ],
)
def test_rewards_of_the_command_line_replace_those_of_the_files(overrides: list[str], gone: list[str]) -> None:
    there = {"math": {"name": "math_verify"}, "format": {"name": "format"}}
    assert deletions("reward.parts", overrides, there) == [f"~reward.parts.{name}" for name in gone]


def test_what_is_replaced_is_removed_beside_what_replaces_it() -> None:
    arguments = ["--cfg", "job", "seed=1", "reward.parts.mine.name=length"]
    assert command_line(arguments, default_name="grpo_qwen3_moe") == [
        "--cfg", "job", "++seed=1", "~reward.parts.exact_match", "++reward.parts.mine.name=length",
    ]  # fmt: skip
    assert list(load("grpo_qwen3_moe", arguments[2:]).reward.parts) == ["mine"]


def test_a_line_of_the_log_says_which_rewards_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        command_line(["+reward.parts.mine.name=length"], default_name="grpo_qwen3_moe")
    assert caplog.text == ""
    with caplog.at_level("INFO"):
        command_line(["reward.parts.mine.name=length"], default_name="grpo_qwen3_moe")
    assert "reward.parts of the command line replaces exact_match; +reward.parts.NAME would add to it" in caplog.text


def test_a_file_that_inherits_adds_rewards_and_leaves_out_with_null(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [grpo_qwen3_moe, _self_]\nreward:\n  parts:\n    mine: {name: length}\n")
    assert list(load("mine", config_dir=str(tmp_path)).reward.parts) == ["exact_match", "mine"]
    file.write_text(file.read_text() + "    exact_match: null\n")
    assert list(load("mine", config_dir=str(tmp_path)).reward.parts) == ["mine"]


def test_a_folder_at_home_is_found() -> None:
    assert load("grpo_qwen3_moe", ["output=~/runs/first"]).output == str(Path.home() / "runs/first")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("${oc.env:RLFRAME_NOWHERE}", "data.system_prompt: Environment variable 'RLFRAME_NOWHERE' not found"),
        ("${nowhere.else}", "data.system_prompt: Interpolation key 'nowhere.else' not found"),
    ],
)
def test_an_interpolation_that_leads_nowhere_is_said_with_its_key(value: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("grpo_qwen3_moe", [f"data.system_prompt={value}"])
    assert list(map(str, refused.value.faults)) == [said]
