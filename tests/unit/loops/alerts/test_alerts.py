"""Alerts on series worked by hand: when each speaks, what it says, and what says nothing."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlframe.loops.alerts import rules
from rlframe.loops.alerts.base import Alert
from rlframe.loops.alerts.config import CLASSES, AlertsConfig, OwnAlertConfig
from rlframe.loops.alerts.watch import Alerts
from rlframe.loops.config import LoggingConfig
from rlframe.loops.reporting.metrics import MetricsLog
from rlframe.loops.stop import Stop, Stopped
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError, SettingError

OWN = '''
from dataclasses import dataclass
from rlframe import Alert


@dataclass
class Settings:
    least: float = 0.2


class Unformatted(Alert[Settings]):
    """Says that too few responses have the right format."""

    def look(self, step, metrics):
        value = metrics.get("reward/format_mean", 1.0)
        return f"reward/format_mean is {value:g}, below {self.config.least:g}" if value < self.config.least else None
'''


def first(alert: Alert[Any], metric: str, values: Iterable[float]) -> tuple[int, str] | None:
    """Returns the first step at which an alert speaks, from 1, and its sentence."""
    for step, value in enumerate(values, start=1):
        if sentence := alert.look(step, {metric: value}):
            return step, sentence
    return None


def test_a_loss_that_is_no_number_is_said_at_once() -> None:
    alert = rules.NotFinite(rules.NotFiniteConfig())
    assert first(alert, "train/loss", [0.1, -0.2, math.nan]) == (
        3,
        "train/loss is nan, which is not finite: look for infinite rewards or logprobs in samples.jsonl, and lower "
        "train.optimizer.lr",
    )
    assert first(alert, "train/grad_norm", [math.inf]) is not None
    assert first(alert, "train/entropy_nats", [math.nan]) is None, "not one of its metrics"


LIMITS = [
    (rules.GroupsFlat(rules.GroupsFlatConfig(steps=3)), 0.95, 0.94, "is 0.95, at least 0.95 for 3 steps"),
    (rules.Truncated(rules.TruncatedConfig(steps=3)), 0.5, 0.4999, "is 0.5, at least 0.5 for 3 steps"),
    (rules.Repetitive(rules.RepetitiveConfig(steps=3)), 0.8, 0.3, "is 0.8, at least 0.5 for 3 steps"),
    (rules.RewardsFail(rules.RewardsFailConfig(steps=3)), 0.2, 0.05, "is 0.2, at least 0.1 for 3 steps"),
    (rules.EntropyCollapsed(rules.EntropyCollapsedConfig(steps=3)), 0.0099, 0.01, "is 0.0099, below 0.01 for 3 steps"),
    (rules.FewEffective(rules.FewEffectiveConfig(steps=3)), 0.4, 0.5, "is 0.4, below 0.5 for 3 steps"),
]


def test_responses_that_are_cut_off_less_and_less_are_no_alert() -> None:
    falling = [0.9 - 0.01 * step for step in range(30)]
    assert first(rules.Truncated(rules.TruncatedConfig()), "rollout/truncated_fraction", falling) is None
    # It falls for 20 steps and then stays: the first half of the last 20 is above it until step 34.
    stuck = [*falling[:20], *[0.7] * 20]
    found = first(rules.Truncated(rules.TruncatedConfig()), "rollout/truncated_fraction", stuck)
    assert found is not None and 30 < found[0] <= 40


@pytest.mark.parametrize(("alert", "bad", "good", "said"), LIMITS, ids=lambda each: type(each).__name__)
def test_a_limit_counts_steps_in_a_row(alert: rules.Limit[Any], bad: float, good: float, said: str) -> None:
    found = first(alert, alert.metric, [bad, bad, good, bad, bad, good, bad, bad, bad])
    assert found is not None and found[0] == 9
    assert found[1].startswith(f"{alert.metric} {said}: ") and found[1].endswith(alert.advice)
    assert first(type(alert)(alert.config), alert.metric, [good] * 50) is None
    assert type(alert)(alert.config).look(1, {}) is None, "a run without the metric"


def test_the_reward_must_rise_from_where_it_was() -> None:
    def alert() -> rules.RewardFlat:
        return rules.RewardFlat(rules.RewardFlatConfig(steps=4, errors=2.0))

    # First 0 1 0 1: mean 0.5, variance 1/3. The same again: a rise of 0, standard error sqrt(2/3/4) = 0.408.
    found = first(alert(), "reward/mean", [0, 1, 0, 1, 0, 1, 0, 1])
    assert found is not None and found[0] == 8
    assert found[1].startswith(
        "reward/mean is 0.5 over the last 4 steps and was 0.5 over the first 4, a rise of less than 2 standard errors "
        "(0.41): nothing has been learnt"
    )
    # First 0.4 0.5 0.4 0.5, last 0.6 0.7 0.6 0.7: variances 1/300, error 0.0408, a rise of 0.2 is 4.9 of it.
    risen = [0.4, 0.5, 0.4, 0.5, 0.6, 0.7, 0.6, 0.7]
    assert first(alert(), "reward/mean", risen) is None
    assert first(alert(), "reward/mean", [*risen, *[0.65] * 50]) is None, "one that has risen may stay there"
    # The window 0.7 0.6 0.7 0.4: mean 0.6, variance 0.02, error sqrt((1/300 + 0.02) / 4) = 0.0764. It rose by 0.15.
    fallen = first(alert(), "reward/mean", [*risen, 0.4])
    assert fallen is not None and fallen[0] == 9
    assert first(alert(), "reward/mean", [1.0] * 8) is not None, (
        "a reward that is the same from the start teaches nothing"
    )
    assert first(alert(), "reward/mean", [math.nan] * 50) is None


def test_a_gap_that_grows_is_compared_with_the_runs_first_steps() -> None:
    def alert() -> rules.GapGrows:
        return rules.GapGrows(rules.GapGrowsConfig(steps=3, earlier=2, factor=3.0, least_nats=0.02))

    metric = "rollout/logprob_gap_mean_nats"
    # Median of the first two 0.01; the last three 0.01 0.04 0.05 have the median 0.04, four times as much.
    found = first(alert(), metric, [0.01, 0.01, 0.01, 0.01, 0.04, 0.05])
    assert found is not None and found[0] == 6
    assert found[1].startswith(
        f"{metric} is 0.04 (median of the last 3 steps) and was 0.01 before, beyond a factor of 3: trainer and engine"
    )
    slowly = [0.01 * 1.05**step for step in range(30)]
    assert first(alert(), metric, slowly) is not None, "a slow drift is seen too"
    assert first(alert(), metric, [1e-7, 1e-7, *[1e-3] * 20]) is None, "far below what bfloat16 does"
    assert first(alert(), metric, [0.01, 0.01, 0.01, 9.0, 0.01, 0.01, 9.0, 0.01, 0.01]) is None, "single steps"


def test_lengths_that_double_within_the_window_explode() -> None:
    def alert() -> rules.LengthsExplode:
        return rules.LengthsExplode(rules.LengthsExplodeConfig(steps=2, earlier=4, factor=2.0, least_tokens=64))

    metric = "rollout/response_tokens_mean"
    # Before: 50 50 50 50. Last: 100 120, median 110.
    found = first(alert(), metric, [50, 50, 50, 50, 100, 120])
    assert found is not None and found[0] == 6 and "is 110 (median of the last 2 steps) and was 50 before" in found[1]
    assert first(alert(), metric, [5, 5, 5, 5, 20, 30]) is None, "short ones may"
    assert first(alert(), metric, [100 * 1.1**step for step in range(60)]) is None, "by a tenth a step in four steps"


def test_throughput_that_has_halved_is_said() -> None:
    found = slow_at([100, 100, 100, 100, 50, 50])
    assert found is not None and found[0] == 6 and "is 50 (median of the last 2 steps) and was 100 before" in found[1]
    assert slow_at([100, 10, 100, 100, 10, 100, 100, 51, 51]) is None
    assert slow_at([10, 10, 10, 10, 1000, 1000]) is None, "faster is no trouble"
    assert slow_at([100, 100, 100, 100, 50, 50], tokens=[1000] * 4 + [100] * 2) is None, "shorter responses"


def slow_at(speeds: Sequence[float], *, tokens: Sequence[float] = (), least_s: float = 0.0) -> tuple[int, str] | None:
    """Returns the first step at which `slow` speaks about so many tokens a second, in steps of 1000 tokens."""
    alert = rules.Slow(rules.SlowConfig(steps=2, earlier=4, least_s=least_s))
    for step, (speed, count) in enumerate(zip(speeds, tokens or [1000] * len(speeds), strict=True), start=1):
        metrics = {"throughput/tokens_per_s": speed, "time/step_s": count / speed}
        if sentence := alert.look(step, metrics):
            return step, sentence
    return None


def test_throughput_must_stay_low_for_a_while() -> None:
    # Steps of 10 s, then of 20 s. Of the slow ones the second and all after it count: 20, 40, 60 s.
    fast, low = [100.0] * 4, [50.0] * 9
    found = slow_at([*fast, *low], least_s=60)
    assert found is not None and found[0] == 8 and "was 100 before" in found[1]
    # Slow for longer than the earlier steps that are remembered: it is compared with those before it began.
    found = slow_at([*fast, *low], least_s=160)
    assert found is not None and found[0] == 13 and "was 100 before" in found[1]
    assert slow_at([*fast, *low[:3], *fast, *low[:3]], least_s=60) is None, "it came and went"


def series(seed: int) -> list[dict[str, float]]:
    """Returns what a recorded run of the main job, of 500 steps, showed of the metrics that alerts look at. Other
    programs ran beside the first seed: its throughput halved for a while."""
    columns: Mapping[str, list[float]] = json.loads((Path(__file__).parent / "main_job.json").read_text())[str(seed)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_main_job_has_no_alert(seed: int) -> None:
    said: list[str] = []
    alerts = Alerts(AlertsConfig(), said.append)
    steps = series(seed)
    for step, metrics in enumerate(steps, start=1):
        alerts.look(step, metrics)
    assert len(steps) == 500 and said == []


def test_load_that_comes_and_goes_is_not_said() -> None:
    impatient, alert = (rules.Slow(rules.SlowConfig(least_s=least_s)) for least_s in (0.0, 1200.0))
    steps = series(0)
    assert any(impatient.look(step, metrics) for step, metrics in enumerate(steps, start=1))
    assert not any(alert.look(step, metrics) for step, metrics in enumerate(steps, start=1))


def test_every_alert_can_speak_about_a_series() -> None:
    assert set(CLASSES) == {type(settings) for _, settings in AlertsConfig().given()}
    assert {type(alert) for alert, *_ in LIMITS} == {kind for kind in CLASSES.values() if issubclass(kind, rules.Limit)}


def log_of(folder: Path, config: AlertsConfig, *, done_steps: int | None = None) -> MetricsLog:
    logging = LoggingConfig(tensorboard=False, progress=False)
    return MetricsLog(logging, folder, name="it", steps=9, done_steps=done_steps, alerts=config)


def warned(folder: Path) -> list[tuple[int, str]]:
    """Returns step and text of each line of warnings.jsonl."""
    file = folder / "warnings.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(record["step"], record["text"]) for record in records]


def test_an_alert_is_said_once_also_after_a_resume_and_names_its_page(tmp_path: Path) -> None:
    config = AlertsConfig(truncated=rules.TruncatedConfig(limit=0.5, steps=2))
    log = log_of(tmp_path, config)
    for step in (1, 2, 3):
        log.log(step, {"rollout/truncated_fraction": 0.75, "time/step_s": 1.0})
    log.close()
    ((step, text),) = warned(tmp_path)
    assert step == 2, "also without a progress bar"
    assert text.startswith("alert truncated at step 2: rollout/truncated_fraction is 0.75, at least 0.5 for 2 steps: ")
    assert text.endswith("(docs/metrics.md#alerts)")
    resumed = log_of(tmp_path, config, done_steps=3)
    resumed.log(4, {"rollout/truncated_fraction": 0.75, "time/step_s": 1.0})
    resumed.rewind(1)
    resumed.log(2, {"rollout/truncated_fraction": 0.75, "time/step_s": 1.0})
    resumed.close()
    assert len(warned(tmp_path)) == 1


def test_a_resumed_run_knows_the_steps_before(tmp_path: Path) -> None:
    config = AlertsConfig(truncated=rules.TruncatedConfig(steps=3))
    for done_steps, steps in ((None, (1, 2)), (2, (3,))):
        log = log_of(tmp_path, config, done_steps=done_steps)
        for step in steps:
            log.log_evaluation(step, {"evaluation/reward_mean": 0.0})
            log.log(step, {"rollout/truncated_fraction": 0.75, "time/step_s": 1.0})
        log.close()
    assert [text[:27] for _, text in warned(tmp_path)] == ["alert truncated at step 3: "]


def test_an_alert_that_stops_ends_the_run_as_a_failure_and_saves_nothing_that_is_not_due() -> None:
    stop, saved = Stop(), []
    alerts = Alerts(AlertsConfig(stop=["not_finite"]), lambda _: None)
    alerts.stop = lambda reason: stop.ask(reason, saves=False)
    with pytest.raises(Stopped) as raised:
        for step in stop.steps(1, 9, settle=lambda: None):
            alerts.look(step, {"train/loss": math.nan if step == 2 else 0.0})
            saved += [step] if stop.begins_save(step, due=False) else []
    assert raised.value.code == 1 and saved == []
    assert str(raised.value).startswith("alert not_finite: train/loss is nan, which is not finite: ")
    assert str(raised.value).endswith(
        ": ended after step 2 of 9; the same command resumes from the last checkpoint, if any"
    )


def test_an_alert_that_goes_on_after_a_resume_ends_the_run_again(tmp_path: Path) -> None:
    """It has been said, and nothing of it is better."""
    told: list[str] = []
    config = AlertsConfig(stop=["truncated"], truncated=rules.TruncatedConfig(steps=2))
    for done_steps, steps in ((None, (1, 2)), (2, (3,))):
        log = log_of(tmp_path, config, done_steps=done_steps)
        assert log.alerts
        log.alerts.stop = told.append
        for step in steps:
            log.log(step, {"rollout/truncated_fraction": 0.75, "time/step_s": 1.0})
        log.close()
    assert [reason[:16] for reason in told] == ["alert truncated:"] * 2
    assert len(warned(tmp_path)) == 1


def test_an_alert_of_ones_own_is_one_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    own = {"unformatted": OwnAlertConfig(name=f"{file}:Unformatted", options={"least": 0.5})}
    said: list[str] = []
    stopped: list[str] = []
    alerts = Alerts(AlertsConfig(own=own, stop=["unformatted"]), said.append)
    alerts.stop = stopped.append
    for step, value in enumerate([0.9, 0.4, 0.3], start=1):
        alerts.look(step, {"reward/format_mean": value})
    assert said == [
        "warning: alert unformatted at step 2: reward/format_mean is 0.4, below 0.5 (docs/metrics.md#alerts)"
    ]
    assert stopped[0] == "alert unformatted: reward/format_mean is 0.4, below 0.5"
    own["unformatted"].options = {"lest": 0.5}
    with pytest.raises(ConfigError, match=r"alerts\.own\.unformatted\.options\.lest is not a key; did you mean"):
        Alerts(AlertsConfig(own=own), said.append)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stop": ["truncatd"]}, "stop must name alerts that are on: .*truncated, got 'truncatd'"),
        ({"stop": ["slow"], "slow": None}, "stop must name alerts that are on: .*, got 'slow'"),
        ({"own": {"slow": {"name": "a.py:B"}}}, "own must have names .* that no other alert has, got 'slow'"),
        ({"truncated": {"limit": 3.0}}, "truncated.limit must be at most 1, got 3.0"),
        ({"truncated": {"lim": 3.0}}, "truncated.lim is not a key; did you mean truncated.limit"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, SettingError), match=said):
        build(AlertsConfig, values)


def test_null_switches_an_alert_off() -> None:
    assert dict(AlertsConfig().given()).keys() - dict(build(AlertsConfig, {"slow": None}).given()) == {"slow"}
