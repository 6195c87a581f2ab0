"""Operations against what the benchmarks of training count, and the model of decoding against hand arithmetic."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlframe.megatron.config.options import ContextCommunication, ContextParallelConfig
from rlframe.models.families.qwen3 import FAMILY as QWEN3
from rlframe.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from rlframe.models.families.qwen3_next import FAMILY as QWEN3_NEXT
from rlframe.run.preflight import constants, seconds
from rlframe.run.preflight.devices import KINDS
from rlframe.run.preflight.seconds import Responses
from tests.unit.run.preflight.models import MOE, QWEN3_4B, STATES, planned

RESULTS = Path(__file__).parents[4] / "examples/benchmarks/results"


@pytest.mark.parametrize(("name", "family"), [("qwen3_4b", QWEN3), ("qwen3_30b_a3b_ep4", QWEN3_MOE)])
def test_operations_are_those_that_the_benchmarks_count(name: str, family) -> None:  # noqa: ANN001
    (case,) = json.loads((RESULTS / f"train_step_{name}.json").read_text())["cases"].values()
    architecture = family.architecture(case["config"])
    length = seconds.mean_length(case["lengths"])
    assert seconds.training_operations(architecture, mean_length=length) == pytest.approx(case["flops_per_token"])


def test_a_decode_step_of_one_request_reads_every_weight_once(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", QWEN3_4B)
    engine, speeds = found.engine, found.accelerator.speeds
    assert engine is not None and speeds is not None
    one = Responses(sequences=1, prompt_tokens=0, tokens=100, longest=100)
    step = 2 * 4_022_468_096 / (speeds.memory * constants.DECODE_EFFICIENCY) + 36 * constants.DECODE_LAYER_S
    cache = 100 * 50 * 147_456 / (speeds.memory * constants.DECODE_EFFICIENCY)
    assert seconds.generation(engine, speeds, one, 0.0) == pytest.approx(100 * step + cache)


def test_a_decode_step_of_many_short_requests_waits_for_the_engines_process(tmp_path: Path) -> None:
    many = Responses(sequences=512, prompt_tokens=0, tokens=100, longest=100)
    cases = (
        ("rollout.tp=1", "+rollout.worker_process=false", 30e-6),
        ("rollout.tp=1", "+rollout.worker_process=null", 16e-6),
        ("rollout.tp=4", "+rollout.worker_process=null", 45e-6),
    )
    for tp, apart, each in cases:
        found = planned(tmp_path / "a", QWEN3_4B, tp, apart, "rollout.max_num_seqs=512")
        engine, speeds = found.engine, found.accelerator.speeds
        assert engine is not None and speeds is not None
        assert seconds.generation(engine, speeds, many, 0.0) == pytest.approx(100 * 512 * each)
    # One long sequence keeps the device busy.
    long = replace(many, sequences=8, prompt_tokens=100_000, longest=100)
    assert seconds.generation(engine, speeds, long, 0.0) > 10 * 100 * 8 * each


@pytest.mark.parametrize(("setting", "shares"), [("false", False), ("true", True), ("null", True)])
def test_responses_of_a_group_read_their_prompt_once_as_long_as_a_layers_part_stays_in_the_cache(
    tmp_path: Path, setting: str, shares: bool
) -> None:
    found = planned(tmp_path / "a", QWEN3_4B, f"rollout.share_prompts={setting}")
    engine, speeds = found.engine, found.accelerator.speeds
    assert engine is not None and speeds is not None
    bandwidth = speeds.memory * constants.DECODE_EFFICIENCY

    def read(prompt: int, group: int) -> float:
        """Seconds that the prompt adds to 8 responses of 100 tokens."""
        whole = Responses(sequences=8, prompt_tokens=prompt, tokens=100, longest=100, group=group)
        without = replace(whole, prompt_tokens=0)
        return seconds.generation(engine, speeds, whole, 0.0) - seconds.generation(engine, speeds, without, 0.0)

    # 4,096 bytes a token and layer: 12,207 tokens are 50 MB.
    assert read(12_000, 1) == pytest.approx(8 * 100 * 12_000 * 147_456 / bandwidth)
    assert read(12_000, 8) == pytest.approx(read(12_000, 1) / 8)
    # With kernels that share it they do so whatever its length.
    assert read(13_000, 8) == pytest.approx(read(13_000, 1) / (8 if shares else 1))


def test_one_token_reads_its_own_experts_and_many_read_all(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", MOE)
    assert found.engine is not None
    experts = 48 * 128 * 3 * 2048 * 768
    dense = 30_532_122_624 - experts - 151936 * 2048
    assert seconds.weights_read(found.engine, 1.0) == pytest.approx(2 * (dense + experts * 8 / 128))
    assert seconds.weights_read(found.engine, 1000.0) == pytest.approx(2 * (dense + experts))


def test_gated_delta_nets_cost_the_same_at_any_length_and_keep_states() -> None:
    architecture = QWEN3_NEXT.architecture(STATES)
    one = seconds.operations(architecture, (0,), mean_length=1000.0, last=False)
    inputs, values = 2 * 16 * 128 + 2 * 32 * 128 + 2 * 32, 32 * 128
    experts = 2048 * 512 + 3 * 2048 * 512
    assert one.dense == 2 * (2048 * (inputs + values) + experts)
    assert one.attention == 2 * 32 * (64 * 5 * 128 + 3 * 128 * 128)
    assert one == seconds.operations(architecture, (0,), mean_length=9000.0, last=False)
    # The layer with keys and values has a gate for each query.
    other = seconds.operations(architecture, (3,), mean_length=1000.0, last=False)
    assert other.dense == 2 * (2048 * 256 * (3 * 16 + 2 * 2) + experts)
    assert other.attention == 2 * 1000 * 16 * 256


def test_logits_are_counted_of_tokens_in_the_loss_alone(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", MOE)
    whole, half = (
        seconds.operations(found.architecture, (), mean_length=1.0, last=True, predicted=share) for share in (1.0, 0.5)
    )
    assert whole.head == 2 * half.head == 2 * 2048 * 151936
    assert found.division.predicted == found.workload.response_tokens / found.workload.sequence_tokens


def test_an_engine_keeps_keys_and_values_of_every_fourth_layer_of_qwen3_next(tmp_path: Path) -> None:
    engine = planned(tmp_path / "a", STATES).engine
    assert engine is not None
    assert engine.parameters == 79_674_391_296
    assert engine.state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert engine.token_bytes == 12 * 2 * 2 * 256 * 2 + engine.state_bytes / engine.sequence_tokens


def test_engines_that_only_evaluate_do_not_sample(tmp_path: Path) -> None:
    apart = (
        "cluster.colocate=false",
        "loop.max_policy_lag=1",
        "train.offload_optimizer=false",
        "rollout.num_engines=4",
    )
    all_sample = planned(tmp_path / "a", QWEN3_4B, *apart)
    one_samples = planned(tmp_path / "a", QWEN3_4B, *apart, "evaluation.num_engines=3")
    assert all_sample.engine and one_samples.engine
    assert one_samples.engine.sequences == 4 * all_sample.engine.sequences == 512
    assert one_samples.step_seconds["generation"] > 2 * all_sample.step_seconds["generation"]
    assert one_samples.num_devices == all_sample.num_devices


def test_micro_batches_are_whole_sequences_and_a_pipeline_waits_for_its_stages(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d2p2", "train.max_tokens_per_microbatch=16384")
    # 64 prompts * 8 sequences of 5,120 tokens: 256 on each rank, 3 a micro-batch.
    assert (found.division.microbatches, found.division.tokens, found.division.updates) == (86, 16384, 1)
    timed = found.timed(found.trainer, found.division)
    slowest = max(timed.one_pass(stage, backward=True).seconds for stage in found.trainer.stages())
    assert timed.passes(backward=True) == pytest.approx(87 * slowest)


def test_sampling_beside_training_hides_the_shorter_of_the_two(tmp_path: Path) -> None:
    split = ("cluster.colocate=false", "train.parallel=d2")
    turns = planned(tmp_path / "a", QWEN3_4B, *split)
    beside = planned(tmp_path / "a", QWEN3_4B, *split, "loop.max_policy_lag=1")
    assert turns.total_seconds == pytest.approx(sum(turns.step_seconds.values()))
    sampling = beside.step_seconds["generation"]
    assert beside.total_seconds == pytest.approx(max(sampling, sum(beside.step_seconds.values()) - sampling))


def test_muon_adds_the_products_that_orthogonalise_shared_by_the_ranks_of_a_stage(tmp_path: Path) -> None:
    def update(*overrides: str) -> float:
        plan = planned(tmp_path / "a", QWEN3_4B, *overrides)
        return plan.timed(plan.trainer, plan.division).update()

    speeds = KINDS["h200"].speeds
    assert speeds is not None
    hidden, queries, keys, width = 2560, 4096, 1024, 9728
    shapes = [(hidden, queries)] * 2 + [(hidden, keys)] * 2 + [(hidden, width)] * 3
    each = sum(4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3 for shape in shapes)
    products = 36 * 5 * each / (speeds.flops * constants.DENSE_EFFICIENCY)
    # Muon leaves the rest to torch's AdamW.
    settings = ("train.kernels.optimizer_fusion=false",), ("train.optimizer.name=muon",)
    one = [update("train.parallel=d1", *own) for own in settings]
    two = [update("train.parallel=d2", *own) for own in settings]
    # Of two moments a matrix keeps one, which is read and written.
    saved = 36 * sum(a * b for a, b in shapes) * 4 * 2 / (speeds.memory * constants.OPTIMIZER_BANDWIDTH_APART)
    assert one[1] - one[0] == pytest.approx(products - saved)
    assert two[1] - two[0] == pytest.approx((products - saved) / 2)
    fused = constants.OPTIMIZER_BANDWIDTH_APART / constants.OPTIMIZER_BANDWIDTH
    assert update("train.parallel=d1") == pytest.approx(one[0] * fused)


@pytest.mark.parametrize(
    "settings",
    [["+train.lora.rank=8"], ["train.recompute=full", "train.recompute_options.method=block"]],
    ids=["adapters", "block"],
)
def test_a_stage_without_layers_takes_no_seconds_of_layers(tmp_path: Path, settings: list[str]) -> None:
    stages = "train.parallel={pp: 3, pipeline_layout: Ett|tt|L}"
    found = planned(tmp_path / "a", QWEN3_4B | {"num_hidden_layers": 4}, stages, *settings)
    *_, last = found.trainer.stages()
    spent = found.timed(found.trainer, found.division).one_pass(last, backward=True)
    assert (spent.attention, spent.experts, spent.elementwise, spent.launches) == (0, 0, 0, 0)


@pytest.mark.thorough
def test_adapters_move_their_inputs_and_outputs(tmp_path: Path) -> None:
    settings = ("train.recompute=full", "train.lora.rank=32", "train.max_tokens_per_microbatch=16384")
    found = planned(tmp_path / "a", QWEN3_4B, *settings)
    (stage,) = found.trainer.stages()
    with_adapters = found.timed(found.trainer, found.division)
    without = replace(with_adapters, memory=replace(found.trainer, train=replace(found.run.train, lora=None)))
    # Four weights a layer: queries, keys and values in one, the projection, gate and up in one, down.
    inputs = 36 * (2560 + 4096 + 2560 + 9728)
    outputs = 36 * (4096 + 2 * 1024 + 2560 + 2 * 9728 + 2560)
    numbers = {False: inputs + 4 * outputs, True: 2 * (inputs + 4 * outputs) + 5 * inputs + 2 * outputs}
    for backward, count in numbers.items():
        own, other = (each.one_pass(stage, backward=backward).elementwise for each in (with_adapters, without))
        expected = 2 * with_adapters.tokens * count / with_adapters.speeds.memory
        assert own - other == pytest.approx(expected)


def test_heads_and_host_copies_of_a_long_sequence_take_the_links_time(tmp_path: Path) -> None:
    settings = ("train.parallel=c4", "train.recompute=full", "train.max_tokens_per_microbatch=32768")
    found = planned(tmp_path / "a", QWEN3_4B, *settings)
    (stage,) = found.trainer.stages()
    ring = found.timed(found.trainer, found.division)
    by_heads = replace(found.run.train, context_parallel=ContextParallelConfig(communication=ContextCommunication.A2A))
    heads = replace(ring, memory=replace(found.trainer, train=by_heads))
    # A ring of four sends 8 heads of keys and of values three times, an exchange three quarters of 2 * (32 + 8) heads.
    ratio = heads.one_pass(stage, backward=True).exchange / ring.one_pass(stage, backward=True).exchange
    assert ratio == pytest.approx((2 * 40 * 3 / 4) / (2 * 8 * 3))
    waiting = replace(ring, memory=replace(found.trainer, train=replace(found.run.train, offload_activations=True)))
    back = waiting.one_pass(stage, backward=True).exchange - ring.one_pass(stage, backward=True).exchange
    assert back == pytest.approx(36 * ring.tokens * 2560 * 2 / constants.HOST_BANDWIDTH)
