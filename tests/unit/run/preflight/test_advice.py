"""What does not fit is refused with changes that make it fit, and layouts that are proposed fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlframe.run.check import checked, faults_of_settings
from rlframe.run.check.context import algorithm_of
from rlframe.run.check.machines import memory
from rlframe.run.load import load
from rlframe.run.preflight.advice import advise, singles
from rlframe.run.preflight.explain import explained
from rlframe.run.preflight.layouts import best
from rlframe.run.preflight.parts import Phase
from rlframe.run.preflight.plan import plan
from rlframe.utils.errors import ConfigError, OutOfMemory
from rlframe.utils.faults import shown
from tests.unit.run.preflight.models import CUDA, MOE, QWEN3_4B, folder, planned

GIANT = MOE | {"hidden_size": 2048 * 64}
"""Two trillion parameters, more than the memory of any host."""


def test_what_fits_is_not_refused(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", QWEN3_4B, "train.offload_optimizer=true", "train.recompute=full")
    assert found.fits and list(memory.device_faults(found)) == []


def test_what_cannot_fit_is_refused_with_changes_that_make_it_fit(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", MOE, "train.parallel=d8e8", "rollout.num_engines=8", "train.recompute=full")
    (fault,) = memory.device_faults(found)
    assert str(fault.key) == "cluster.preflight" and "generation takes" in str(fault)
    assert "train.offload_optimizer=true (from false) frees" in str(fault) and "the run fits" in str(fault)
    # Not counted for a refusal: CUDA's context, NCCL, CUDA graphs, the engine's workspaces.
    assert found.missing_bytes - found.certainly_missing_bytes == pytest.approx(0.7e9 + 1.0e9 + 1.2e9 + 2.5e9)
    advice = advise(found)
    assert all(each.fits and each.plan.fits for each in advice)
    for each in advice:
        assert each.frees == pytest.approx(found.worst.peak_bytes - each.plan.worst.peak_bytes)


def test_advice_names_every_setting_that_it_changes_and_breaks_no_rule(tmp_path: Path) -> None:
    aware = ("train.optimizer.precision_aware=true", "train.recompute=selective")
    modules = ("train.recompute_options.modules=[core_attn]", "evaluation.max_tokens=7000")
    settings = (*aware, *modules, "rollout.max_model_len=null", "train.max_tokens_per_microbatch=10000")
    found = planned(tmp_path / "a", QWEN3_4B, *settings)
    assert faults_of_settings(found.run) == []
    known = replace(found, rules=faults_of_settings)
    # Micro-batches of half as many tokens would not hold an evaluation's longest response.
    shorter = [str(each) for each in singles(found) if "train.max_tokens_per_microbatch" in str(each)]
    assert shorter and not any("train.max_tokens_per_microbatch" in str(each) for each in singles(known))
    texts = [str(each) for each in singles(known)]
    of_recompute = [text for text in texts if "train.recompute=full" in text]
    assert of_recompute and all("recompute_options.modules=[] (from ['core_attn'])" in text for text in of_recompute)
    for each in singles(known):
        overrides = [f"{change.key}={shown(change.new)}" for change in each.changes]
        path = f"model.path={found.run.model.path}"
        assert faults_of_settings(load("grpo_qwen3_moe", [*CUDA, path, *settings, *overrides])) == []


def test_changes_are_combined_where_none_is_enough(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", MOE, "train.parallel=d4e4", "rollout.num_engines=4", device="h100")
    advice = advise(found)
    assert not any(each.fits for each in advice[:-1])
    assert advice[-1].fits and len(advice[-1].changes) > 1


def test_an_engine_without_room_for_a_sequence_is_refused(tmp_path: Path) -> None:
    found = planned(
        tmp_path / "a",
        MOE,
        "rollout.gpu_memory_utilization=0.2",
        "cluster.colocate=false",
        "train.parallel=d8e8",
        "train.recompute=full",
    )
    assert found.engine is not None and found.engine.cache_tokens == 0
    faults = [str(fault) for fault in memory.device_faults(found)]
    assert len(faults) == 1 and faults[0].startswith("rollout.gpu_memory_utilization leaves no room")


def test_engines_that_never_sleep_are_told_to_and_a_cache_that_is_too_large_to_shrink(tmp_path: Path) -> None:
    settings = ("rollout.kv_cache_gb=70", "train.recompute=full", "train.offload_optimizer=true")
    advice = list(map(str, advise(planned(tmp_path / "a", QWEN3_4B, "rollout.sleep_level=0", *settings))))
    assert advice[0].startswith("rollout.sleep_level=2 (from 0) frees") and advice[0].endswith("the run fits")
    assert any(each.startswith("rollout.kv_cache_gb=") and each.endswith("the run fits") for each in advice)


def test_a_cache_of_a_given_size_that_holds_no_sequence_is_refused(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", QWEN3_4B, "rollout.kv_cache_gb=0.01", "train.recompute=full")
    (fault,) = memory.device_faults(found)
    assert str(fault).startswith("rollout.kv_cache_gb leaves no room for the keys and values of one sequence, got 0.01")


def test_a_cpu_run_is_refused_only_if_weights_and_optimizer_alone_exceed_the_machine(tmp_path: Path) -> None:
    overrides = [f"model.path={folder(tmp_path / 'giant', GIANT)}", "train.parallel=d1", "cluster.device=cpu"]
    run = load("grpo_qwen3_moe", overrides)
    (fault,) = memory.faults(run)
    assert "this machine has" in str(fault) and "cluster.preflight=off" in str(fault)
    run.cluster.preflight = memory.Preflight.OFF
    assert list(memory.faults(run)) == []
    assert list(memory.faults(load("grpo_qwen3_moe"))) == []


@pytest.mark.thorough
def test_the_refusal_comes_with_all_other_faults_before_anything_starts(tmp_path: Path) -> None:
    run = load("grpo_qwen3_moe", [f"model.path={folder(tmp_path / 'giant', GIANT)}"])
    values = {"name": "x", "output": str(tmp_path), "algorithm": {"name": "grpo"}, "model": {"path": run.model.path}}
    with pytest.raises(ConfigError, match="this machine has"):
        checked(values | {"train": {"dtype": "float32"}})


def test_proposed_layouts_fit_and_are_in_the_order_of_their_seconds(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", MOE, "train.parallel=d8e8", "rollout.num_engines=8")
    layouts = best(found, 8)
    assert len(layouts) == 3 and all(layout.plan.fits and layout.plan.num_devices == 8 for layout in layouts)
    totals = [layout.plan.total_seconds for layout in layouts]
    assert totals == sorted(totals)
    # The arguments give the same plan.
    run = load("grpo_qwen3_moe", [*CUDA, f"model.path={found.run.model.path}", *map(unquoted, layouts[0].overrides)])
    again = plan(run, algorithm_of(run), found.accelerator)
    assert (
        again.total_seconds == pytest.approx(totals[0]) and again.worst.peak_bytes == layouts[0].plan.worst.peak_bytes
    )


def test_proposed_layouts_leave_other_models_the_devices_of_their_own(tmp_path: Path) -> None:
    reward = [f"reward.model.path={folder(tmp_path / 'reward', QWEN3_4B)}", "reward.model.parallel=t2"]
    settings = ("train.parallel=d6", "rollout.num_engines=6", *reward, "reward.model.colocate=false")
    found = planned(tmp_path / "a", QWEN3_4B, *settings)
    assert found.num_devices == 8
    layouts = best(found, 8)
    assert layouts and all(layout.plan.num_devices == 8 for layout in layouts)
    # A critic of the same layout takes as many devices as the policy.
    apart = planned(tmp_path / "a", QWEN3_4B, "algorithm=ppo", "train.parallel=d1", "+critic.colocate=false")
    assert all(layout.plan.num_devices <= 4 for layout in best(apart, 4))


def test_engines_of_one_device_with_a_worker_apart_are_compared_with_those_of_several(tmp_path: Path) -> None:
    settings = ("train.parallel=d8e8", "rollout.num_engines=8", "++rollout.worker_process=true")
    layouts = best(planned(tmp_path / "a", MOE, *settings), 8)
    assert any(layout.plan.run.rollout.devices_per_engine > 1 for layout in layouts)


def unquoted(text: str) -> str:
    """An argument as the shell passes it on; settings that a group of YAML leaves out need no plus here."""
    return text.replace("'", "")


def test_an_error_of_memory_says_what_was_predicted_and_what_would_free_memory(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1")
    error = OutOfMemory("policy", 0, "train", "CUDA out of memory.", "NVIDIA H200", found.accelerator.memory_bytes)
    told = explained(found.run, found.algorithm, error)
    lines = str(told).splitlines()
    assert lines[0] == "policy rank 0 ran out of the memory of NVIDIA H200 in train: CUDA out of memory."
    gigabytes = found.devices[0].bytes_at(Phase.TRAIN) / 1e9
    assert lines[1].startswith(f"predicted for train: {gigabytes:.2f} GB on each of 1 devices with policy, engines")
    assert any("train.recompute=full (from none) would free" in line for line in lines[2:])


def test_an_error_of_an_unknown_role_keeps_its_text(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", QWEN3_4B)
    broken = replace(found.run, train=replace(found.run.train, parallel="d1t3"))
    error = OutOfMemory("policy", 0, "train", "CUDA out of memory.")
    assert explained(broken, found.algorithm, error) is error
