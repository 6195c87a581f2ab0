"""Rules of the modes: what is not used is not checked, and what cannot work is refused with its key."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlframe.algorithms.grpo import Grpo
from rlframe.cluster.roles import ENGINES, POLICY
from rlframe.megatron.memory.reference import ReferenceWeights
from rlframe.models import tokenizer
from rlframe.models.hub import resolve
from rlframe.run.check import check, checked
from rlframe.run.compose.modes.self_test import facts, without_learning
from rlframe.run.load import load
from rlframe.run.roles import topology
from rlframe.utils.errors import ConfigError

pytestmark = pytest.mark.later


@pytest.fixture(autouse=True)
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a few sums in the working folder."""
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": f"{number}+1=", "answer": f"{number + 1}"} for number in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def faults(*overrides: str, config: str = "grpo_qwen3_moe") -> list[str]:
    data = [] if config.startswith("dpo") else ["data.path=sums.jsonl"]
    try:
        check(load(config, [*data, *overrides]))
    except ConfigError as error:
        return list(map(str, error.faults))
    return []


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(3)))
    return file


@pytest.mark.parametrize(
    "config",
    [
        "grpo_qwen3_moe",
        pytest.param("grpo_qwen3_moe_async", marks=pytest.mark.thorough),
        pytest.param("dpo_qwen3_moe_tiny", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("mode", ["train", "evaluate", "generate", "self_test"])
def test_a_recipe_works_in_every_mode_and_with_no_steps(config: str, mode: str) -> None:
    steps = ["steps=0", "train.optimizer.schedule=linear"] if mode == "train" else []
    assert faults(f"mode={mode}", *steps, config=config) == []


def test_settings_of_training_are_not_used_where_nothing_trains() -> None:
    wrong = ["train.parallel=d3t5", "prompts_per_step=7", "train.num_minibatches=4"]
    assert len(faults(*wrong)) > 1
    assert faults("mode=evaluate", *wrong) == []
    assert faults("mode=generate", *wrong) == []


def test_a_longer_response_than_a_micro_batch_can_be_evaluated() -> None:
    longer = ["train.max_tokens_per_microbatch=64", "data.max_prompt_tokens=60", "evaluation.max_tokens=100"]
    assert any("train.max_tokens_per_microbatch" in fault for fault in faults(*longer))
    assert faults("mode=evaluate", *longer) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["generation.top_p=0.9"], "generation.top_p has no effect with mode=train, got 0.9; remove it"),
        (
            ["mode=evaluate", "data.evaluation_count=0"],
            "data.evaluation_count must be above 0 with mode=evaluate, got 0",
        ),
        (
            ["mode=evaluate", "rollout.replay=old"],
            "rollout.replay has no effect with mode=evaluate, got old; remove it",
        ),
        (["mode=generate", "checkpoint.start_from=old"], "checkpoint.start_from must be null with mode=generate"),
        (["mode=generate", "data.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["evaluation.sets.math.path=nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["mode=generate", "generation.max_tokens=5000"],
            "data.max_prompt_tokens=1024 + generation.max_tokens=5000 must be at most the model's positions",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], expected: str) -> None:
    found = faults(*overrides)
    assert len(found) == 1 and expected in found[0], found


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["mode=evalute"], "mode must be one of train, evaluate, generate, self_test, got 'evalute'"),
        (
            ["evaluation.sets.math.path=arithmetic", "evaluation.sets.math.samples_per_prompt=8"],
            "evaluation.sets.math.samples_per_prompt must be 1 with temperature=0, got 8: greedy responses to a prompt",
        ),
        (
            ["evaluation.sets.math.path=arithmetic", "evaluation.sets.math.solved_reward=0.5"],
            "evaluation.sets.math.solved_reward has no effect with samples_per_prompt=1",
        ),
        (
            ["evaluation.sets.math.path=arithmetic", "evaluation.sets.math.majority=exact_match"],
            "evaluation.sets.math.majority has no effect with samples_per_prompt=1, which gives no maj@k",
        ),
        (["evaluation.sets.held_out.path=arithmetic"], "evaluation.sets must have names of letters"),
        (["evaluation.sets.math.temperature=1"], "evaluation.sets.math.path must be"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load("grpo_qwen3_moe", overrides)
    assert expected in str(refusal.value)


def test_a_majority_needs_a_reward_that_reads_answers(tmp_path: Path) -> None:
    voting = [f"evaluation.sets.math.{each}" for each in ("path=arithmetic#8", "samples_per_prompt=2", "temperature=1")]
    assert faults(*voting, "evaluation.sets.math.majority=exact_match") == []
    (fault,) = faults(*voting, "evaluation.sets.math.majority=exact_mach")
    assert fault.endswith("must be one of reward.parts, exact_match, got 'exact_mach'; did you mean exact_match?")
    (tmp_path / "own.py").write_text("def score(response, answer):\n    return 1.0\n")
    own = f"reward.parts.mine.name={tmp_path}/own.py:score"
    (fault,) = faults(*voting, own, "evaluation.sets.math.majority=mine")
    assert "majority must name a reward part that says which answer a response gives, got mine: " in fault
    assert "def extract(self, attempt: Attempt) -> str | None" in fault


def test_a_set_without_the_answers_that_a_reward_needs_is_refused(prompts: Path) -> None:
    (fault,) = faults(f"evaluation.sets.math.path={prompts}")
    assert fault.startswith("evaluation.sets.math.answer_key must name the field with the answer, which reward.parts.")
    # To generate, nothing has to be judged.
    assert faults("mode=generate", f"data.path={prompts}") == []


def test_sets_have_no_effect_offline() -> None:
    (fault,) = faults("evaluation.sets.math.path=arithmetic", config="dpo_qwen3_moe_tiny")
    assert "evaluation.sets has no effect with algorithm.name=dpo" in fault


def test_engines_alone_get_devices_where_nothing_trains() -> None:
    def roles(mode: str, *, online: bool) -> list[str]:
        run = load("grpo_qwen3_moe", [f"mode={mode}", "cluster.colocate=true"])
        return [role.name for role in topology(run, online=online, has_critic=False).roles]

    assert roles("train", online=True) == [POLICY, ENGINES]
    assert roles("evaluate", online=True) == [ENGINES] == roles("generate", online=False)
    # The loss of given sequences is computed in the policy's ranks.
    assert roles("evaluate", online=False) == [POLICY]


def test_each_mode_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = [load("grpo_qwen3_moe", [f"output={tmp_path}", f"mode={mode}"]).folder for mode in ("train", "evaluate")]
    assert folders == [tmp_path, tmp_path / "evaluate"]


def test_a_fault_elsewhere_does_not_hide_the_mode() -> None:
    with pytest.raises(ConfigError) as refusal:
        checked(
            {"name": "x", "output": "x", "mode": "generate", "algorithm": {"name": "grpo"}, "generation": {"top_p": 2}}
        )
    assert "generation.top_p must be at most 1, got 2" in str(refusal.value)


def test_sets_alone_are_worth_an_evaluation() -> None:
    nothing = ["data.evaluation_count=0", "evaluation.every_steps=2", "evaluation.max_tokens=4"]
    assert len(faults(*nothing)) == 2
    assert faults(*nothing, "evaluation.sets.math.path=sums.jsonl#8") == []


def test_the_folder_of_a_run_is_not_its_model(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    (fault,) = faults("mode=evaluate", f"model.path={tmp_path / 'run'}")
    assert fault.endswith(f"is not a model in Hugging Face format; did you mean {tmp_path / 'run' / 'model'}?")
    (tmp_path / "step" / "training").mkdir(parents=True)
    (tmp_path / "step" / "training" / ".metadata").touch()
    (fault,) = faults("mode=evaluate", f"model.path={tmp_path / 'step'}")
    assert "it is a checkpoint of training, which python -m rlframe.tools.convert makes a model of" in fault


def test_a_self_test_names_its_checks_and_needs_engines() -> None:
    (fault,) = faults("mode=self_test", "self_test.without=[gab]")
    assert fault.startswith("self_test.without must name checks") and "did you mean gap?" in fault
    assert any(
        each.startswith("rollout.replay must be null") for each in faults("mode=self_test", "rollout.replay=run")
    )
    (fault,) = faults("self_test.steps=9")
    assert fault.startswith("self_test.steps has no effect with mode=train")


def test_each_step_of_a_self_test_trains_the_policy() -> None:
    config = load("ppo_qwen3_8b", ["algorithm.critic_warmup_steps=3"])
    still = without_learning(config)
    assert (config.algorithm.critic_warmup_steps, still.algorithm.critic_warmup_steps) == (3, 0)
    assert still.train.optimizer.lr == still.critic_train.optimizer.lr == 0


def test_each_step_of_a_self_test_measures_the_same() -> None:
    for given, expected in ((0, 0), (1, 1), (7, 1)):
        config = load("grpo_qwen3_moe", [f"train.norms_every_steps={given}"])
        assert without_learning(config).train.norms_every_steps == expected


def test_a_self_test_audits_engines_that_take_reloads_whatever_the_run_does() -> None:
    for asked, expected in ((0, 1), (10, 10)):
        config = load("grpo_qwen3_moe", [f"weight_sync.audit_every_steps={asked}"])
        assert without_learning(config).weight_sync.audit_every_steps == expected
        assert config.weight_sync.audit_every_steps == asked


def test_nothing_else_moves_weights_in_a_self_test() -> None:
    config = load("grpo_qwen3_moe", ["train.moe.bias_update_rate=0.01", "critic.train={moe: {bias_update_rate: 0.1}}"])
    still = without_learning(config)
    assert config.train.moe.bias_update_rate == 0.01
    assert still.train.moe.bias_update_rate == still.critic_train.moe.bias_update_rate == 0


def test_no_step_of_a_self_test_is_skipped() -> None:
    outliers = [f"train.optimizer.{name}" for name in ("skip_norm_above=0.1", "skip_outlier_factor=2")]
    config = load("grpo_qwen3_moe", outliers)
    assert config.train.optimizer.skips
    assert not without_learning(config).train.optimizer.skips


def test_a_reference_that_follows_stays_in_a_self_test_bit_for_bit() -> None:
    config = load("grpo_qwen3_moe", ["algorithm.kl_coefficient=0.1", "algorithm.reference_update.every_steps=2"])
    update = without_learning(config).algorithm.reference_update
    assert (config.algorithm.reference_update.mix, update.every_steps) == (0.6, 2)
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    reference = ReferenceWeights([weights], follows=True)
    reference.follow(update.mix)
    assert torch.equal(reference.kept[0], weights)


@pytest.mark.parametrize(
    ("lora", "given"), [([], False), (["train.lora.rank=4"], False), (["train.lora.path=a"], True)]
)
def test_a_self_test_knows_of_an_adapter_to_go_on_from(lora: list[str], given: bool) -> None:
    config = load("grpo_qwen3_moe", lora)
    parts = SimpleNamespace(config=config, tokenizer=tokenizer.load(resolve(config.model)), device=torch.device("cpu"))
    assert facts(parts, Grpo(config.algorithm)).given_adapter is given


def test_an_algorithm_that_does_not_sample_the_group_size_that_is_set_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    forgetful = """
from dataclasses import dataclass
from rlframe.algorithms.grpo import Grpo, GrpoConfig

@dataclass(kw_only=True, slots=True)
class OwnConfig(GrpoConfig):
    pass

class Own(Grpo):
    def __init__(self, config: OwnConfig):
        super().__init__(config)
        self.group_size = 1
"""
    own.write_text(forgetful)
    (fault,) = faults(f"algorithm.name={own}:Own", "algorithm.group_size=4")
    assert fault.startswith("algorithm.group_size must be 1, as many rollouts of a prompt as algorithm.name=")
    assert fault.endswith("got 4; or its __init__ sets self.group_size = config.group_size")
