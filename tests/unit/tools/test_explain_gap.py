"""The ladder's own rules, on sides whose gap is a sum of planted parts, and its words."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.cluster.config import Device
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.run.load import load
from rlframe.tools.explain_gap import main
from rlframe.tools.explain_gap.answer import facts, remedies, table
from rlframe.tools.explain_gap.gap import gap
from rlframe.tools.explain_gap.ladder import Climb, Ladder, Limits
from rlframe.tools.explain_gap.rest import describe
from rlframe.tools.explain_gap.rung import Rung, Subject
from rlframe.tools.explain_gap.rungs import rungs
from rlframe.tools.explain_gap.settings import changed
from rlframe.tools.explain_gap.sides import Sample
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Scored
from rlframe.utils.errors import WorkerDied

pytestmark = pytest.mark.later
TOKENS = np.linspace(-3.0, -0.5, 40).astype(np.float32)


class Sides:
    """Sides whose engine is wrong by a constant for each setting that is not switched, and by another while it
    samples."""

    def __init__(self, parts: Mapping[str, float], *, sampling: float = 0.0, dies_with: str = ""):
        self.num_engine_starts, self.longest_start_s = 0, 0.0
        self.parts, self.sampling, self.dies_with = parts, sampling, dies_with
        self.settings: Mapping[str, Any] | None = None
        self.started: list[set[str]] = []

    def start(self, settings: Mapping[str, Any]) -> None:
        if settings == self.settings:
            return
        self.num_engine_starts += 1
        self.started.append(set(settings))
        if self.dies_with in settings:
            self.settings = None
            raise WorkerDied("rollout-0 died\nand this is its log")
        self.settings = dict(settings)

    @property
    def wrong(self) -> float:
        assert self.settings is not None
        return sum(nats for name, nats in self.parts.items() if name not in self.settings)

    def sample(self) -> Sample:
        sequences = [ModelInput(tuple(range(11))) for _ in range(4)]
        logprobs = TOKENS + self.wrong + self.sampling
        return Sample(sequences=sequences, prompt_tokens=[1] * 4, logprobs=logprobs.astype(np.float32), routes=None)

    def engine(self, sample: Sample, *, alone: bool) -> list[Scored]:
        return [Scored(logprobs=part.tolist()) for part in (TOKENS + self.wrong).reshape(4, 10)]

    def engine_top(self, sample: Sample, k: int) -> list[Any]:
        raise NotImplementedError

    def trainer(self, sample: Sample, *, temperature: float, routes: Any, alone: bool) -> np.ndarray:
        return TOKENS

    def stale_weights(self) -> str:
        return ""

    def send_weights(self) -> None:
        raise NotImplementedError


class Setting(Rung):
    """A rung that switches one setting, and nothing else."""

    question = "?"
    remedy = "set it"
    cost = "nothing"

    def __init__(self, name: str, *, redraws: bool = True):
        self.name, self.redraws = name, redraws

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        return {self.name: 1}


@pytest.fixture(scope="module")
def subject() -> Subject:
    run = load("grpo_qwen3_moe", ["train.dtype=bfloat16"])
    folder = resolve(run.model)
    architecture = load_family(folder).architecture(read_config(folder))
    return Subject(run=run, architecture=architecture, device=Device.CPU, replays=False, why_not="not here")


def climb(subject: Subject, sides: Sides, *names: str, **limits: Any) -> Climb:
    chosen = [Setting(name) for name in names]
    return Ladder(sides, subject, chosen, limits=Limits(**limits)).climb()


def explained(found: Climb) -> dict[str, float]:
    return {"+".join(step.names): round(step.explained, 3) for step in found.steps if step.after}


def test_statistics_of_a_gap_are_those_worked_by_hand() -> None:
    found = gap(np.array([0.0, -1.0, -2.0, -3.0]), np.array([0.0, -1.0, -2.0, -2.0]))
    assert (found.mean_nats, found.max_nats, found.num_tokens) == (0.25, 1.0, 4)
    # exp(1) - 1 - 1 over 4 tokens.
    assert found.k3_nats == pytest.approx((np.e - 2) / 4)
    # Three values 0 and one 1: standard deviation sqrt(3)/4, over sqrt(4).
    assert found.error_nats == pytest.approx(np.sqrt(3) / 8)


def test_rungs_that_explain_little_together_are_not_taken_apart(subject: Subject) -> None:
    sides = Sides({"a": 0.001, "b": 0.001, "rest": 0.1})
    assert explained(climb(subject, sides, "a", "b", "c")) == {"a+b+c": pytest.approx(0.02, abs=1e-3)}
    assert sides.started == [set(), {"a", "b", "c"}]


def test_rungs_that_explain_much_are_taken_apart_and_each_keeps_the_ones_before(subject: Subject) -> None:
    sides = Sides({"a": 0.06, "b": 0.03, "rest": 0.01})
    assert explained(climb(subject, sides, "a", "b")) == {"a": 0.6, "b": 0.3}
    assert sides.started == [set(), {"a", "b"}, {"a"}, {"a", "b"}]


def test_without_starts_left_a_row_stays_together(subject: Subject) -> None:
    sides = Sides({"a": 0.06, "b": 0.03, "rest": 0.01})
    assert explained(climb(subject, sides, "a", "b", engine_starts=3)) == {"a+b": 0.9}


def test_after_the_time_only_the_last_rung_starts_an_engine(subject: Subject) -> None:
    sides = Sides({"a": 0.06, "last": 0.04})
    chosen = [Setting("a"), Setting("last", redraws=False)]
    found = Ladder(sides, subject, chosen, limits=Limits(seconds=0.0)).climb()
    assert [step.skipped for step in found.steps] == ["no time is left of 0 s", ""]
    assert sides.started == [set(), {"last"}]


def test_a_start_that_fails_is_told_and_the_ladder_goes_on(subject: Subject) -> None:
    sides = Sides({"a": 0.06, "last": 0.04}, dies_with="a")
    chosen = [Setting("a"), Setting("last", redraws=False)]
    found = Ladder(sides, subject, chosen).climb()
    assert found.steps[0].skipped == "failed: rollout-0 died"
    assert explained(found) == {"last": 0.4}


def test_what_remains_is_of_the_last_measurement_even_if_nothing_runs_any_more(subject: Subject) -> None:
    sides = Sides({"last": 0.04, "rest": 0.06}, dies_with="last")
    ladder = Ladder(sides, subject, [Setting("last")])
    assert ladder.climb().rest.mean_nats == pytest.approx(0.1)
    assert np.allclose(ladder.engine_nats - ladder.trainer_nats, 0.1)
    assert describe(ladder.sample, ladder.engine_nats, ladder.trainer_nats) == [
        "rank correlation of the sides 1.000: points at what is done with the logits (a softcap, a scale, a bias, a "
        "processor), or rounding",
        "mean by quarter of the response: 0.1, 0.1, 0.1, 0.1 nats",
    ]


def test_the_engines_sampling_and_its_prefill_are_told_apart(subject: Subject) -> None:
    sides = Sides({"rest": 0.02}, sampling=0.08)
    chosen = [rung for rung in rungs() if rung.name in ("routing", "prefill", "batch")]
    found = Ladder(sides, subject, chosen).climb()
    assert explained(found) == {"prefill": 0.8, "batch": 0.0}
    assert found.steps[0].skipped == "not here"
    assert found.steps[1].alone == pytest.approx(0.8)


def test_the_answer_names_shares_refusals_and_remedies(subject: Subject) -> None:
    sides = Sides({"rest": 0.02}, sampling=0.08)
    chosen = [rung for rung in rungs() if rung.name in ("routing", "prefill")]
    found = Ladder(sides, subject, chosen).climb()
    text = "\n".join(table(found))
    assert "mean |trainer - engine| over 40 sampled tokens: 0.100000 nats" in text
    assert "routing                            not climbed: not here" in text
    assert "explained 80.0%; 0.020000 nats remain" in text
    (remedy,) = remedies(found, chosen)
    assert remedy.startswith("80.0% prefill: none")
    written = json.loads(json.dumps(facts(found, chosen)))
    assert written["steps"][1]["questions"] == ["Does the engine's prefill say what it said while it sampled?"]
    assert written["explained"] == pytest.approx(0.8)


def test_rungs_have_places_and_names_of_their_own() -> None:
    found = rungs()
    assert len({rung.place for rung in found}) == len({rung.name for rung in found}) == len(found)
    assert found[-1].name == "float32"
    page = (Path(__file__).parents[3] / "docs/gap.md").read_text()
    assert [rung.name for rung in found if f"| `{rung.name}` |" not in page] == []


def test_settings_are_changed_by_dotted_key_in_a_copy() -> None:
    values = {"train": {"dtype": "bfloat16"}, "loop": {"max_policy_lag": 1}}
    assert changed(values, {"train.kernels.attention": "unfused", "loop": {}}) == {
        "train": {"dtype": "bfloat16", "kernels": {"attention": "unfused"}},
        "loop": {},
    }
    assert values == {"train": {"dtype": "bfloat16"}, "loop": {"max_policy_lag": 1}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config-name", "sft_qwen3_moe_tiny"], "algorithm.name must be an algorithm that trains on what its engine"),
        (["--config-name", "grpo_qwen3_moe", "--skip", "float23"], "did you mean float32?"),
        (["--config-name", "grpo_qwen3_moe", "checkpoint.start_from=x"], "checkpoint.start_from must be null, got x"),
        (["--config-name", "grpo_qwen3_moe", "--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--config-name", "grpo_qwen3_moe", "--output", "."], "--output must be a file, got the folder ."),
        pytest.param(
            # After everything that the configuration says, the recipe's own data included.
            ["--config-name", "grpo_qwen3_moe", "--prompts", "nowhere.jsonl"],
            "nowhere.jsonl",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_what_cannot_be_explained_is_refused_before_anything_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*arguments, f"output={tmp_path}"]) == 2
    assert words in capsys.readouterr().err


def test_a_place_where_no_answer_can_be_written_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert main(["--config-name", "grpo_qwen3_moe", f"output={tmp_path}/file"]) == 1
    assert "file/explain_gap cannot be written: Not a directory; something in" in capsys.readouterr().err
