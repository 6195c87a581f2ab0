"""The run's folder belongs to one configuration."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlframe.megatron.config.optimizer import Schedule
from rlframe.run import folder as output
from rlframe.run.choices import CHOICES
from rlframe.run.config import RunConfig
from rlframe.run.load import load
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError


def claim(run: RunConfig) -> None:
    """Claims the folder as a run does that ends at once."""
    output.claim(run).close()


def run_in(folder: Path, *overrides: str) -> RunConfig:
    return load("grpo_qwen3_moe", [f"output={folder}", *overrides])


def test_the_folder_holds_the_whole_configuration(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    claim(run)
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "overrides.yaml", "run.json"]
    assert build(RunConfig, yaml.safe_load((folder / "config.yaml").read_text()), choices=CHOICES) == run


def test_a_secret_of_the_command_is_hidden_in_the_folder(tmp_path: Path) -> None:
    given = ["cluster.runtime_env.env_vars.MY_PASSWORD=swordfish", f"output={tmp_path}"]
    output.claim(run_in(tmp_path, *given), given).close()
    assert yaml.safe_load((tmp_path / "overrides.yaml").read_text())[0] == given[0].replace("swordfish", "***")
    assert not any(b"swordfish" in file.read_bytes() for file in tmp_path.iterdir() if file.is_file())


def test_a_file_of_ones_own_that_has_changed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("def score(response, answer): return 1.0", "def score(response, answer): return 2.0"):
        (tmp_path / "mine.py").write_text(text)
        for _ in range(2):
            claim(run_in(tmp_path / "run", f"reward.parts.mine.name={tmp_path / 'mine.py'}:score"))
    assert [record.message for record in caplog.records if "has changed" in record.message] == [
        f"{tmp_path / 'mine.py'} has changed since this run was begun in {tmp_path / 'run'}: what comes from now on is "
        "by the file as it is; output=ANOTHER begins anew"
    ]


def test_the_same_configuration_resumes(tmp_path: Path) -> None:
    # Must not raise.
    claim(run_in(tmp_path))
    claim(run_in(tmp_path))


def test_the_day_that_a_template_writes_stays_that_of_the_first_start(tmp_path: Path) -> None:
    assert output.dated(run_in(tmp_path)) == run_in(tmp_path)
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    begun = run_in(tmp_path / "run", f"data.chat_template={template}")
    today = output.dated(begun).data.chat_template_date
    assert today and begun.data.chat_template_date is None
    began = replace(begun, data=replace(begun.data, chat_template_date="2026-11-23"))
    claim(output.dated(began))
    resumed = output.dated(begun)
    assert resumed.data.chat_template_date == "2026-11-23"
    claim(resumed)
    evaluated = run_in(tmp_path / "run", f"data.chat_template={template}", "mode=evaluate")
    assert evaluated.folder != begun.folder
    assert output.dated(evaluated).data.chat_template_date == "2026-11-23"


def test_length_place_and_logging_may_change(tmp_path: Path) -> None:
    claim(run_in(tmp_path))
    changed = run_in(
        tmp_path, "steps=999", "logging.progress=false", "cluster.address=auto", "train.parallel=d2",
        "checkpoint.keep_last=9", "checkpoint.asynchronous=true", "data.cache_folder=null", "alerts.stop=[slow]",
        "alerts.reward_flat=null", "checkpoint.keep_best=1", "checkpoint.best_metric=train/loss",
    )  # fmt: skip
    claim(changed)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["steps"] == 999


def test_another_configuration_is_refused_with_both_values(tmp_path: Path) -> None:
    claim(run_in(tmp_path, "train.optimizer.lr=0.5", "seed=1"))
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as caught:
        claim(run_in(tmp_path, "train.optimizer.lr=0.25", "seed=2", "steps=999"))
    assert list(map(str, caught.value.faults))[:-1] == [
        f"output: {tmp_path / 'config.yaml'} has seed=1, this run has 2",
        f"output: {tmp_path / 'config.yaml'} has train.optimizer.lr=0.5, this run has 0.25",
    ]
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_a_folder_can_be_compared_without_writing_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = run_in(folder, "seed=1")
    other = replace(run, seed=2)
    output.compare(run)
    assert not folder.exists()
    claim(run)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    output.compare(replace(run, steps=999))
    with pytest.raises(ConfigError, match="has seed=1, this run has 2"):
        output.compare(other)
    (folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"run\.json was written for another configuration"):
        output.compare(other)
    (folder / "config.yaml").write_bytes(before["config.yaml"])
    (folder / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.json"):
        output.compare(run)
    assert {path.name for path in folder.iterdir()} == set(before)
    with pytest.raises(ConfigError, match="must be a folder"):
        output.compare(replace(run, output=str(folder / "run.json")))
    # Of a sweep, whose runs have folders in it.
    with pytest.raises(ConfigError, match=r"must be a folder, got the file .*run\.json"):
        output.compare(replace(run, output=str(folder / "run.json" / "0")))


def test_a_key_that_only_one_side_has_is_a_difference(tmp_path: Path) -> None:
    claim(run_in(tmp_path))
    with pytest.raises(ConfigError, match=r"has reward.parts.exact_match.name=exact_match, this run has nothing"):
        claim(run_in(tmp_path, "reward=math"))


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output must be a folder"):
        claim(run_in(tmp_path / "file"))


def test_a_secret_is_not_written_and_may_change_on_resume(tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}", "reward.parts.exact_match.options.api_key=first"]
    run = load("grpo_qwen3_moe", overrides)
    claim(run)
    assert "first" not in (tmp_path / "config.yaml").read_text()
    run.reward.parts["exact_match"].options["api_key"] = "second"
    claim(run)
    assert "api_key: '***'" in (tmp_path / "config.yaml").read_text()


def test_a_folder_that_is_in_use_is_refused_before_anything_in_it_is_read(tmp_path: Path) -> None:
    held = output.claim(run_in(tmp_path))
    (tmp_path / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match="is in use by pid"):
        claim(run_in(tmp_path))
    held.close()
    with pytest.raises(ConfigError, match="is not readable YAML"):
        claim(run_in(tmp_path))
    assert not list(tmp_path.glob("LOCK-*"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/proc/x", "/proc/x cannot be written: No such file or directory"),
        ("/sys/x", "/sys/x cannot be written: "),
        ("/dev/null/x", "Not a directory; something in this path is a file"),
    ],
    ids=["proc", "sys", "below a file"],
)
def test_a_folder_that_cannot_be_made_is_a_sentence(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        claim(run_in(Path(name)))
    assert said in str(caught.value) and len(str(caught.value)) < 700


def test_an_edited_configuration_file_does_not_make_it_another_runs_folder(tmp_path: Path) -> None:
    claim(run_in(tmp_path, "seed=1"))
    file = tmp_path / "config.yaml"
    file.write_text(file.read_text().replace("seed: 1\n", "seed: 2\n"))
    with pytest.raises(ConfigError, match="run.json was written for another configuration"):
        claim(run_in(tmp_path, "seed=2"))
    claim_again = run_in(tmp_path, "seed=2", "steps=3")
    with pytest.raises(ConfigError, match="config.yaml was edited"):
        claim(claim_again)


def course(folder: Path, **optimizer: Any) -> RunConfig:
    """A run whose learning rate falls until the end, made without composing it again."""
    base = whole_run()
    train = replace(base.train, optimizer=replace(base.train.optimizer, **optimizer), num_minibatches=2)
    return replace(base, output=str(folder), train=train)


@cache
def whole_run() -> RunConfig:
    return load("grpo_qwen3_moe", ["steps=300"])


def trained(run: RunConfig) -> Path:
    """Claims the folder as a run does that saves a checkpoint."""
    claim(run)
    folder = Path(run.output)
    (folder / "checkpoints/step-00000005").mkdir(parents=True)
    (folder / "checkpoints/step-00000005/COMPLETE").write_text("")
    return folder


@pytest.mark.parametrize("schedule", [Schedule.LINEAR, Schedule.COSINE, Schedule.WSD])
def test_a_schedule_that_follows_the_length_is_not_bent_by_another_length(schedule: Schedule, tmp_path: Path) -> None:
    trained(course(tmp_path, schedule=schedule))
    with pytest.raises(ConfigError) as caught:
        claim(replace(course(tmp_path, schedule=schedule), steps=400))
    assert list(map(str, caught.value.faults)) == [
        f"steps must be 300 as in {tmp_path / 'config.yaml'}, got 400: train.optimizer.schedule={schedule} follows the "
        "run's length, so that the learning rate would bend; set train.optimizer.decay_steps=600 to keep its "
        "course, or another number to give it a new one"
    ]
    longer = replace(course(tmp_path, schedule=schedule, decay_steps=600), steps=400)
    claim(longer)
    # The same command resumes.
    claim(longer)


def test_a_new_course_is_taken_where_it_is_asked_for_with_a_new_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(course(tmp_path))
    with caplog.at_level("INFO"):
        claim(replace(course(tmp_path, decay_steps=800), steps=400))
    assert "train.optimizer.decay_steps=800: the learning rate leaves the course that ended at 600" in caplog.text
    with pytest.raises(ConfigError, match="decay_steps must be 800 as in .*, or change together with steps, got 700"):
        claim(replace(course(tmp_path, decay_steps=700), steps=400))


def test_the_critics_course_is_kept_too(tmp_path: Path) -> None:
    run = course(tmp_path, schedule=Schedule.CONSTANT)
    critic = replace(run.critic, train=course(tmp_path, schedule=Schedule.COSINE).train)
    run = replace(run, critic=critic)
    trained(run)
    with pytest.raises(ConfigError, match="set critic.train.optimizer.decay_steps=600"):
        claim(replace(run, steps=400))


def test_a_constant_rate_and_a_run_without_a_checkpoint_are_extended_freely(tmp_path: Path) -> None:
    constant = course(tmp_path / "constant", schedule=Schedule.CONSTANT)
    trained(constant)
    claim(replace(constant, steps=400))
    claim(course(tmp_path / "begun"))
    claim(replace(course(tmp_path / "begun"), steps=400))


def test_a_run_that_was_shorter_than_its_warm_up_is_extended_freely(tmp_path: Path) -> None:
    # 300 steps of two updates end with the warm-up; no decay_steps that is allowed would end there too.
    trained(course(tmp_path / "warm", warmup_steps=600))
    claim(replace(course(tmp_path / "warm", warmup_steps=600), steps=400))
    trained(course(tmp_path / "left", warmup_steps=599))
    with pytest.raises(ConfigError, match="set train.optimizer.decay_steps=600"):
        claim(replace(course(tmp_path / "left", warmup_steps=599), steps=400))


def test_a_run_cannot_be_shorter_than_it_is(tmp_path: Path) -> None:
    run = course(tmp_path, schedule=Schedule.CONSTANT)
    folder = trained(run)
    with pytest.raises(ConfigError, match=f"steps must be at least 5, got 4: {folder / 'checkpoints'} has that step"):
        claim(replace(run, steps=4))
    claim(replace(run, steps=5))
