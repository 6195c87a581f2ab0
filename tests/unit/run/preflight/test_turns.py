"""Roles that take turns on a device: what each phase holds, and how long they take to change."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlframe.cluster.roles import CRITIC
from rlframe.run.check import faults_of_settings
from rlframe.run.check.context import algorithm_of
from rlframe.run.load import load
from rlframe.run.preflight import constants
from rlframe.run.preflight.advice import faults_of
from rlframe.run.preflight.describe import facts
from rlframe.run.preflight.devices import KINDS
from rlframe.run.preflight.explain import phase_of
from rlframe.run.preflight.layouts import best
from rlframe.run.preflight.parts import Phase
from rlframe.run.preflight.plan import Plan, plan
from rlframe.run.preflight.turns import Sleeper, Turn, changes
from rlframe.utils.errors import OutOfMemory
from tests.unit.run.preflight.models import QWEN3_4B, folder, planned

PARAMETERS = 4_022_468_096
HEADLESS = PARAMETERS + 2560
"""The critic's, whose head has one output."""
ASLEEP = 2 * PARAMETERS + constants.WORKSPACE_BYTES + constants.CONTEXT_BYTES
ENGINE_ASLEEP = constants.GRAPH_BYTES + constants.ENGINE_ASLEEP_BYTES


def ppo(path: Path, *overrides: str) -> Plan:
    """The plan of a policy, a critic of the same size and an engine on one H200."""
    settings = [f"model.path={folder(path / 'model', QWEN3_4B)}", "train.parallel=d1", "rollout.num_engines=1"]
    run = load("ppo_qwen3_8b", [*settings, "prompts_per_step=64", "train.num_minibatches=2", *overrides])
    return plan(run, algorithm_of(run), KINDS["h200"], prompt_tokens=512, response_tokens=512)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan in which every role sleeps."""
    return ppo(tmp_path_factory.mktemp("whole"))


def held(found: Plan, phase: Phase, role: str) -> float:
    """Bytes of a role in a phase."""
    return sum(part.bytes for name, part in found.devices[0].at(phase) if name == role)


def test_policy_critic_and_engines_each_have_the_device_in_their_phases(whole: Plan) -> None:
    found = whole
    names = [Phase.GENERATION, Phase.LOGPROBS, Phase.CRITIC, Phase.TRAIN, Phase.SYNC]
    assert list(found.phases) == names
    assert [held(found, phase, "policy") == ASLEEP for phase in names] == [True, False, True, False, True]
    asleep = held(found, Phase.TRAIN, "critic")
    assert asleep == pytest.approx(ASLEEP, rel=0.001)
    assert [held(found, phase, "critic") == asleep for phase in names] == [True, True, False, True, True]
    assert [held(found, phase, "engines") == ENGINE_ASLEEP for phase in names] == [False, True, True, True, False]
    states = 18 * HEADLESS + constants.WORKSPACE_BYTES + constants.CONTEXT_BYTES
    work = sum(part.bytes for part in found.devices[0].processes[1].work[Phase.CRITIC])
    assert held(found, Phase.CRITIC, "critic") == states + work
    assert found.critic_trainer is not None
    # Of 16,384 tokens what each layer reads, and a layer that is computed again; a critic has no logits.
    assert work == 16384 * 2560 * 2 * 36 + found.critic_trainer.activations(found.critic_trainer.stages()[0]).working


@pytest.mark.thorough
def test_a_critic_that_stays_awake_keeps_what_it_trained_with(tmp_path: Path, whole: Plan) -> None:
    sleeps, stays = whole, ppo(tmp_path, "critic.train.offload_optimizer=false")
    work = sum(part.bytes for part in stays.devices[0].processes[1].work[Phase.CRITIC])
    more = stays.devices[0].bytes_at(Phase.TRAIN) - sleeps.devices[0].bytes_at(Phase.TRAIN)
    assert more == 16 * HEADLESS + work


def test_logprobs_are_a_phase_only_where_the_policy_computes_any(tmp_path: Path) -> None:
    single = ppo(tmp_path, "train.num_minibatches=1")
    assert Phase.LOGPROBS not in single.phases and "logprobs" not in single.step_seconds
    assert Phase.LOGPROBS in ppo(tmp_path, "train.epochs_per_batch=2", "train.num_minibatches=1").phases


def test_out_of_memory_of_a_critic_is_in_its_phase() -> None:
    assert phase_of(OutOfMemory(CRITIC, 0, "train", "CUDA out of memory.")) is Phase.CRITIC
    assert phase_of(OutOfMemory(CRITIC, 0, "start", "CUDA out of memory.")) is None
    assert phase_of(OutOfMemory("policy", 0, "train", "CUDA out of memory.")) is Phase.TRAIN


def test_what_the_device_counts_has_the_logits_twice_of_who_is_awake(whole: Plan) -> None:
    found = whole
    (device,) = found.devices
    policy, *_ = device.processes
    # 16,384 tokens of 151,936 logits. A critic has none.
    expected = {Phase.LOGPROBS: 16384 * 151936 * 2, Phase.TRAIN: 16384 * 151936 * 2, Phase.CRITIC: 0}
    for phase, more in expected.items():
        assert device.reserved_bytes_at(phase) - device.bytes_at(phase) == more
    assert device.reserved_bytes_at(Phase.GENERATION) == device.bytes_at(Phase.GENERATION)
    told = json.loads(json.dumps(facts(found, [], [])))["devices"][0]
    assert told["reserved"]["critic"] == device.reserved_bytes_at(Phase.CRITIC)
    # Who never sleeps never gives back what its greatest work took.
    awake = replace(policy, asleep=None)
    assert awake.reserved_at(Phase.LOGPROBS) == awake.reserved_at(Phase.TRAIN) == policy.reserved_at(Phase.TRAIN)


def test_each_role_sleeps_once_and_wakes_once_where_it_works_once() -> None:
    roles = {"engines": Sleeper(sleep_s=1, wake_s=2), "policy": Sleeper(sleep_s=10, wake_s=20)}
    turns = [Turn(phase="generation", role="engines"), Turn(phase="train", role="policy")]
    # The policy has made room already when the engines wake.
    sync = Turn(phase="weight sync", role="engines", wakes=False)
    assert changes([*turns, sync], roles) == {"generation": 2, "train": 1 + 20, "weight sync": 10}
    roles["critic"] = Sleeper(sleep_s=100, wake_s=200)
    turns = [turns[0], Turn(phase="logprobs", role="policy"), Turn(phase="critic", role="critic"), turns[1], sync]
    assert changes(turns, roles) == {
        "generation": 2, "logprobs": 1 + 20, "critic": 10 + 200, "train": 100 + 20, "weight sync": 10,
    }  # fmt: skip
    # Engines on devices of their own never sleep, but the others do for them.
    del roles["engines"]
    assert changes([turns[0], turns[2], turns[3]], roles) == {"generation": 10, "critic": 200, "train": 100 + 20}


def test_a_step_counts_values_of_the_whole_batch_and_every_copy_of_optimizers(tmp_path: Path, whole: Plan) -> None:
    found, stays = whole, ppo(tmp_path, "train.offload_optimizer=false", "critic.train.offload_optimizer=false")
    assert found.critic_trainer is not None and stays.critic_trainer is not None
    critic = found.timed(found.critic_trainer, found.division)
    # 64 sequences of 1,024 tokens: two optimizer steps of two micro-batches; the values of all four come first.
    values = 2 * critic.passes(backward=False) + constants.CALL_S
    assert found.division.updates == found.division.microbatches == 2
    assert stays.step_seconds["critic"] == pytest.approx(values + 2 * critic.optimizer_step() + constants.CALL_S)
    # 12 bytes a parameter are copied, and those of gradients given back and taken without.
    leaves = 12 / constants.HOST_BANDWIDTH + 16 / constants.GIVE_BACK_BANDWIDTH
    comes = 12 / constants.HOST_BANDWIDTH + 16 / constants.TAKE_BANDWIDTH
    more = {phase: found.step_seconds[phase] - stays.step_seconds[phase] for phase in found.step_seconds}
    expected = {
        "generation": 0,
        "logprobs": comes * PARAMETERS,
        "critic": leaves * PARAMETERS + comes * HEADLESS,
        "train": leaves * HEADLESS + comes * PARAMETERS,
        "weight sync": leaves * PARAMETERS,
    }
    assert more == pytest.approx(expected, abs=1e-9)


@pytest.mark.thorough
def test_entropies_of_the_batch_are_a_forward_pass_more(tmp_path: Path) -> None:
    found = planned(tmp_path, QWEN3_4B, "train.num_minibatches=2")
    more = planned(tmp_path, QWEN3_4B, "train.num_minibatches=2", "algorithm.top_entropy_fraction=0.2")
    timed = found.timed(found.trainer, found.division)
    forward = 2 * timed.passes(backward=False) + constants.CALL_S
    assert more.step_seconds["train"] - found.step_seconds["train"] == pytest.approx(forward)


@pytest.mark.thorough
def test_an_engine_wakes_its_weights_for_the_sync_and_its_cache_to_sample(tmp_path: Path) -> None:
    cache = "rollout.kv_cache_gb=29.3"
    sleeps = planned(tmp_path, QWEN3_4B, cache).step_seconds
    stays = planned(tmp_path, QWEN3_4B, cache, "rollout.sleep_level=0").step_seconds
    host = planned(tmp_path, QWEN3_4B, cache, "rollout.sleep_level=1").step_seconds
    weights = 2 * PARAMETERS
    assert sleeps["generation"] - stays["generation"] == pytest.approx(0.1)
    assert sleeps["weight sync"] - stays["weight sync"] == pytest.approx(weights / constants.TAKE_BANDWIDTH)
    assert sleeps["train"] - stays["train"] == pytest.approx((weights + 29.3e9) / constants.GIVE_BACK_BANDWIDTH)
    assert host["train"] - sleeps["train"] == pytest.approx(weights / constants.HOST_BANDWIDTH)
    assert host["weight sync"] - sleeps["weight sync"] == pytest.approx(weights / constants.HOST_BANDWIDTH)


def test_a_proposed_layout_changes_the_critic_as_its_arguments_do(tmp_path: Path, whole: Plan) -> None:
    asked = replace(whole, rules=faults_of_settings)
    first = best(asked, 2)[0]
    assert first.plan.run.critic_train.recompute == first.plan.run.train.recompute != whole.run.train.recompute
    assert first.plan.run.critic_train.optimizer.lr == 1e-5
    again = ppo(tmp_path, *first.overrides)
    assert again.worst.peak_bytes == first.plan.worst.peak_bytes
    assert again.total_seconds == pytest.approx(first.plan.total_seconds)


def test_a_critic_that_the_layout_does_not_divide_is_a_fault(tmp_path: Path) -> None:
    critic = folder(tmp_path / "critic", QWEN3_4B | {"num_hidden_layers": 27})
    (fault,) = faults_of(ppo(tmp_path, "train.parallel=d1p2", f"critic.model.path={critic}"))
    assert "pp 2 must divide num_layers 27" in str(fault)


def test_a_teacher_and_a_reward_model_in_ranks_take_a_forward_pass(tmp_path: Path) -> None:
    other = folder(tmp_path / "other", QWEN3_4B)
    settings = ("train.parallel=d1", "prompts_per_step=64", "train.num_minibatches=1")
    alone = planned(tmp_path / "a", QWEN3_4B, *settings)
    judged = planned(tmp_path / "a", QWEN3_4B, *settings, f"reward.model.path={other}")
    taught = planned(tmp_path / "a", QWEN3_4B, *settings, "algorithm=on_policy_distillation", f"+teacher.path={other}")
    head, speeds = 151936 * 2560, KINDS["h200"].speeds
    assert speeds is not None and "logprobs" not in alone.step_seconds
    # The products of every token, and attention: a reward model has no logits.
    products = [
        2 * weights * found.workload.tokens / (speeds.flops * constants.DENSE_EFFICIENCY)
        for found, weights in ((judged, PARAMETERS - head), (taught, PARAMETERS))
    ]
    for found, least in zip((judged, taught), products, strict=True):
        assert 0.95 * least < found.step_seconds["logprobs"] < 2 * least
