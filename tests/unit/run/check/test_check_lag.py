"""Which runs can sample for later steps while they train, and what is said of losses without a trust region."""

from pathlib import Path

import pytest

from rlframe.algorithms.requirements import RunFacts
from rlframe.run.check import check
from rlframe.run.check.context import algorithm_of
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError

AHEAD = ["cluster.colocate=false", "loop.max_policy_lag=2"]
BYPASS = "algorithm.correction.bypass=true"
OWN_SAMPLER = """
from dataclasses import replace

from rlframe.algorithms.grpo import Grpo, GrpoConfig


class Mine(Grpo):
    def __init__(self, config: GrpoConfig):
        super().__init__(config)

    @property
    def requirements(self):
        return replace(super().requirements, sampling=object)
"""


def faults(*overrides: str, config: str = "grpo_qwen3_moe") -> list[str]:
    try:
        check(load(config, list(overrides)))
    except ConfigError as error:
        return list(map(str, error.faults))
    return []


def cautions(*overrides: str) -> list[str]:
    run = load("grpo_qwen3_moe", list(overrides))
    return list(algorithm_of(run).cautions(run.facts))


@pytest.mark.parametrize(
    "overrides",
    [
        ["loop.pipeline_depth=2"],
        ["loop.in_flight_updates=false"],
        ["rollout.cache_after_sync=keep"],
        ["algorithm=dapo"],
        ["algorithm=ppo"],
    ],
    ids=" ".join,
)
def test_engines_with_devices_of_their_own_may_sample_ahead(overrides: list[str]) -> None:
    assert faults(*AHEAD, *overrides) == []


def test_engines_that_take_turns_with_the_policy_cannot_sample_ahead() -> None:
    assert faults("loop.max_policy_lag=2") == [
        "loop.max_policy_lag must be 0 with cluster.colocate=true, got 2: policy and engines share devices and take "
        "turns, so that nothing is sampled while the policy trains; set cluster.colocate=false, which gives the "
        "engines devices of their own, or carry unfinished groups over with rollout.oversample"
    ]


def test_engines_that_only_evaluate_are_some_of_those_that_sample_ahead() -> None:
    assert faults(*AHEAD, "evaluation.num_engines=1") == []
    few = ": they are some of those engines, and at least one must sample for training"
    assert faults(*AHEAD, "evaluation.num_engines=2") == [
        f"evaluation.num_engines must be below rollout.num_engines=2, got 2{few}"
    ]
    turns = (
        "got 1: training waits for evaluations there, and all engines can do them; set cluster.colocate=false and "
        "loop.max_policy_lag above 0"
    )
    assert faults("evaluation.num_engines=1") == [
        f"evaluation.num_engines must be 0 with cluster.colocate=true, {turns}"
    ]
    assert faults("cluster.colocate=false", "evaluation.num_engines=1") == [
        f"evaluation.num_engines must be 0 with loop.max_policy_lag=0, {turns}"
    ]


def test_the_pipeline_is_no_deeper_than_the_lag() -> None:
    assert faults(*AHEAD, "loop.pipeline_depth=3") == [
        "loop.pipeline_depth must be at most max_policy_lag=2, got 3: what is sampled further ahead would be "
        "too old when it is trained on"
    ]


def test_steps_that_train_on_the_datas_responses_are_not_sampled_ahead() -> None:
    gkd = ["algorithm.on_policy_fraction=0.5", *AHEAD]
    why = (
        "loop.max_policy_lag must be 0 with algorithm.name=gkd, with these settings, got 2: its sampler makes the "
        "batch of one step at a time"
    )
    assert why in faults(*gkd, config="gkd_qwen3_moe_tiny")


def test_a_sampler_of_ones_own_samples_in_turns(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_SAMPLER)
    (fault,) = faults(*AHEAD, f"algorithm.name={file}:Mine")
    assert fault.startswith("loop.max_policy_lag must be 0 with algorithm.name=") and "one step at a time" in fault
    assert faults(f"algorithm.name={file}:Mine") == []


def test_a_loss_that_nothing_bounds_is_warned_about_above_lag_0() -> None:
    assert cautions() == []
    assert cautions(*AHEAD) == [
        "loop.max_policy_lag=2 trains on tokens of older policies, and with train.num_minibatches * "
        "train.epochs_per_batch = 1 their ratio to the old policy is 1, so that nothing corrects for their age, so "
        "that training may become unstable; set algorithm.correction.bypass=true (a clip against the engine's "
        "logprobs), or algorithm.correction.weight=token with algorithm.correction.weight_cap=2, or "
        "algorithm.correction.masks"
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        [BYPASS],
        ["algorithm.correction.weight=token", "algorithm.correction.weight_cap=2"],
        ["algorithm.correction.masks=[{of: seq_geo, low: 0.99, high: 1.01}]"],
        ["algorithm.correction.stray_limit_nats=0.1"],
        ["train.num_minibatches=2"],
        ["train.epochs_per_batch=2", "algorithm.correction.weight=token"],
        ["algorithm=cispo", BYPASS],
        ["algorithm=dppo", BYPASS],
    ],
    ids=" ".join,
)
def test_a_trust_region_is_not_warned_about(overrides: list[str]) -> None:
    assert cautions(*AHEAD, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.correction.weight=token"], "algorithm.correction.weight=token without a weight_cap lets one"),
        (["algorithm=kl_cov", BYPASS], "algorithm.name=kl_cov does not bound their ratio to the old policy"),
        (["algorithm=kl_cov", "train.num_minibatches=2"], "algorithm.name=kl_cov does not bound their ratio"),
        (["algorithm=rloo"], "their ratio to the old policy is 1"),
        (["algorithm=cispo"], "their ratio to the old policy is 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_bound_old_tokens_is_told(overrides: list[str], reason: str) -> None:
    (caution,) = cautions(*AHEAD, *overrides)
    assert reason in caution


@pytest.mark.parametrize(("setting", "is_told"), [("false", True), ("true", False)])
def test_an_estimator_of_the_kl_whose_gradient_is_noise_is_told(setting: str, is_told: bool) -> None:
    kl = ["algorithm.kl_coefficient=0.1", f"algorithm.kl_in_reward={setting}"]
    found = cautions("algorithm=rloo", *kl)
    assert [("kl_estimator=k1 in the loss is 0" in each, "kl_estimator=k2" in each) for each in found] == [
        (True, True)
    ] * is_told
    assert cautions("algorithm=rloo") == cautions("algorithm=rloo", *kl, "algorithm.kl_estimator=k2") == []


def test_the_facts_of_a_run_have_its_lag() -> None:
    assert load("grpo_qwen3_moe", AHEAD).facts == RunFacts(
        updates_per_batch=1, reward_names=("exact_match",), max_policy_lag=2
    )


CARRIES = ["rollout.oversample=1.5", "loop.max_policy_lag=1"]


@pytest.mark.parametrize(
    "overrides",
    [
        CARRIES,
        ["rollout.oversample=3", "loop.max_policy_lag=2"],
        ["rollout.oversample=1.5", "rollout.oversample_rest=drop"],
        ["rollout.oversample=5", "rollout.oversample_rest=drop", "cluster.colocate=false"],
    ],
    ids=" ".join,
)
def test_a_step_may_begin_more_groups_than_it_trains_on(overrides: list[str]) -> None:
    assert faults(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ["rollout.oversample=1.5"],
            "loop.max_policy_lag must be at least 1 with rollout.oversample_rest=carry, got 0: the tokens of a group "
            "that is carried over are older than the policy that trains on them; or set rollout.oversample_rest=drop",
        ),
        (
            ["rollout.oversample=2.5", "loop.max_policy_lag=1"],
            "rollout.oversample must be at most 2 with loop.max_policy_lag=1, got 2.5: the policy could not train on "
            "more groups before their tokens are too old",
        ),
        (
            [*AHEAD, "rollout.oversample=1.5"],
            "rollout.oversample must be 1 with cluster.colocate=false, unless groups are dropped at "
            "loop.max_policy_lag=0, got 1.5: with a lag engines sample for later steps while the policy trains, and a "
            "step takes what is done; set loop.max_policy_lag and loop.pipeline_depth in its place, or "
            "rollout.oversample_rest=drop",
        ),
        (
            ["rollout.oversample_rest=drop"],
            "rollout.oversample_rest has no effect with oversample=1, got drop; remove it",
        ),
        (
            [*CARRIES, "loop.in_flight_updates=false"],
            "loop.in_flight_updates has no effect with cluster.colocate=true: engines and policy take turns, got "
            "false; remove it",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_left_unfinished_is_refused(overrides: list[str], fault: str) -> None:
    assert faults(*overrides) == [fault]


def test_a_lag_with_groups_that_are_thrown_away_is_refused() -> None:
    (fault,) = faults("rollout.oversample=1.5", "rollout.oversample_rest=drop", "loop.max_policy_lag=1")
    assert fault.startswith("loop.max_policy_lag must be 0 with cluster.colocate=true")


def test_a_sampler_of_one_step_does_not_oversample() -> None:
    drop = ["rollout.oversample=1.5", "rollout.oversample_rest=drop", "algorithm.on_policy_fraction=0.5"]
    expected = "rollout.oversample must be 1 with algorithm.name=gkd, with these settings, got 1.5: its sampler"
    assert any(fault.startswith(expected) for fault in faults(*drop, config="gkd_qwen3_moe_tiny"))


def test_groups_that_are_carried_over_are_warned_about_like_a_lag() -> None:
    (caution,) = cautions(*CARRIES)
    assert caution.startswith("loop.max_policy_lag=1 trains on tokens of older policies")
