"""Layout shorthand and the ranges of the training settings."""

import pytest

from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.utils.build import build


@pytest.mark.parametrize(
    ("text", "expected", "world", "edp"),
    [
        ("d1", Parallel(), 1, 1),
        ("d4", Parallel(dp=4), 4, 4),
        ("t2", Parallel(tp=2), 2, 2),
        ("d2p3t2c2", Parallel(dp=2, pp=3, tp=2, cp=2), 24, 8),
        ("p3d2c2t2", Parallel(dp=2, pp=3, tp=2, cp=2), 24, 8),
        ("d16", Parallel(dp=16), 16, 16),
        # EP over the ranks of the other axes.
        ("d2e2", Parallel(dp=2, ep=2), 2, 1),
        ("d2t2e4", Parallel(dp=2, tp=2, ep=4), 4, 1),
        # Expert axes spelled out: one world of ranks, cut in two ways.
        ("d4t1|ffn:d1t1e4", Parallel(dp=4, ep=4), 4, 1),
        ("attn:d2t2|ffn:d2e2", Parallel(dp=2, tp=2, ep=2), 4, 2),
        ("d1t2|ffn:d1t2", Parallel(tp=2, etp=2), 2, 1),
        ("d1p2v2", Parallel(pp=2, vpp=2), 2, 1),
        # DESIGN.md's example: 16 ranks, 4 stages of 4.
        ("d1p4t2c2|ffn:d1p4t1e4", Parallel(pp=4, tp=2, cp=2, ep=4), 16, 1),
    ],
)
def test_layouts_are_understood(text: str, expected: Parallel, world: int, edp: int) -> None:
    parallel = Parallel.parse(text)
    assert parallel == expected
    assert (parallel.world, parallel.edp) == (world, edp)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a layout such as d2, d1t2p1"),
        ("2", "'2' is not a layout"),
        ("d", "'d' is not a layout"),
        ("d2 t2", "'d2 t2' is not a layout"),
        ("d-1", "'d-1' is not a layout"),
        ("d2d2", "'d2d2' is not a layout"),
        ("D2", "'D2' is not a layout"),
        ("d1|ffn:", "is not a layout"),
        ("d1|", "is not a layout"),
        ("d1x2", "unknown axis 'x'; known are d, t, p, v, c, e"),
        ("d0", "every size must be at least 1"),
        ("d2e2|ffn:d1e2", "e belongs to the ffn part, c and v to the attention part"),
        ("d2|ffn:c2", "e belongs to the ffn part, c and v to the attention part"),
        ("d1p2|ffn:d2", "p must be the same in both parts, got 2 and 1"),
        ("d4|ffn:d1e2", "the ffn part fills 2 ranks, the attention part 4"),
        ("d2e3", r"world 2 = dp 2 \* tp 1 \* pp 1 \* cp 1 must be a multiple of etp \* ep \* pp = 1 \* 3 \* 1 = 3"),
        ("p2e2", r"world 2 = dp 1 \* tp 1 \* pp 2 \* cp 1 must be a multiple of etp \* ep \* pp = 1 \* 2 \* 2 = 4"),
    ],
)
def test_layouts_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parallel.parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"vpp": 2}, "vpp has no effect with pp=1, got 2"),
        ({"first_stage_layers": 2}, "first_stage_layers has no effect with pp=1, got 2"),
        ({"pp": 2, "last_stage_layers": 0}, "last_stage_layers must be at least 1, got 0"),
        ({"pipeline_layout": "Et|tL"}, "pipeline_layout has no effect with pp=1"),
        ({"pp": 2, "pipeline_layout": "Et|t|L"}, r"pipeline_layout 'Et\|t\|L' has 3 chunks, which pp 2 must divide"),
        ({"pp": 2, "vpp": 3, "pipeline_layout": "Et|t|t|L"}, "vpp must be 2 = 4 chunks / pp 2, got 3"),
        (
            {"pp": 2, "first_stage_layers": 1, "pipeline_layout": "Et|L"},
            "first_stage_layers has no effect with pipeline_layout, got 1",
        ),
        (
            {"tp": 2, "cp": 2, "ep": 3},
            r"world 4 = dp 1 \* tp 2 \* pp 1 \* cp 2 must be a multiple of .* = 1 \* 3 \* 1 = 3",
        ),
    ],
)
def test_fields_that_cannot_be_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parallel(**fields)


def test_a_layout_string_gives_the_number_of_chunks() -> None:
    assert Parallel(pp=2, pipeline_layout="Et|t|t|L").vpp == 2


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (Parallel(), "d1"),
        (Parallel(dp=2, tp=2, pp=2, vpp=2, cp=3, ep=4), "d2t2p2v2c3e4"),
        (Parallel(tp=2, etp=2), "{tp: 2, etp: 2}"),
        (Parallel(pp=2, first_stage_layers=3), "{pp: 2, first_stage_layers: 3}"),
    ],
)
def test_a_layout_is_shown_as_it_may_be_written(parallel: Parallel, text: str) -> None:
    assert str(parallel) == text
    assert text.startswith("{") or Parallel.parse(text) == parallel


def test_the_token_budget_is_per_rank_and_context_parallel_ranks_share_a_sequence() -> None:
    assert TrainConfig(parallel="d2c4", max_tokens_per_microbatch=100).sequence_tokens == 400


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parallel": "d2x1"}, "parallel is wrong: 'd2x1': unknown axis 'x'"),
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch must be at least 1, got 0"),
        ({"num_minibatches": 0}, "num_minibatches must be at least 1, got 0"),
        ({"epochs_per_batch": -1}, "epochs_per_batch must be at least 1, got -1"),
        ({"logits_chunk_tokens": 0}, "logits_chunk_tokens must be at least 1, got 0"),
        ({"offload_activations": True}, "offload_activations needs recompute=full with .*got recompute=none"),
    ],
)
def test_train_settings_out_of_range_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0, got 0.0"),
        ({"lr": 1e-5, "min_lr": 1e-4}, r"min_lr must be at most lr=1e-05, got 0.0001"),
        ({"min_lr": -1.0}, r"min_lr must be at least 0, got"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"decay_fraction": 0.0}, r"decay_fraction must be above 0, got 0.0"),
        ({"clip_grad": -1.0}, r"clip_grad must be at least 0 \(0 turns clipping off\), got -1.0"),
    ],
)
def test_optimizer_settings_out_of_range_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**wrong)


def test_experts_are_one_operation_where_nobody_waits_for_their_gradients() -> None:
    assert build(TrainConfig, {}).joins_experts
    for settings in (
        {"kernels": {"expert_products": False}},
        {"kernels": {"gradient_accumulation_fusion": False}},
        {"parallel": "d2", "communication": {"overlap_grad_reduce": True}},
        {"fp8": {"recipe": "blockwise"}},
    ):
        assert not build(TrainConfig, settings).joins_experts, settings


def test_one_kernel_takes_the_steps_of_adamw_alone() -> None:
    assert build(TrainConfig, {}).fuses_optimizer
    for settings in (
        {"kernels": {"optimizer_fusion": False}},
        {"optimizer": {"name": "muon"}},
        {"optimizer": {"cpu_offload_fraction": 0.5}},
        {"mtp": {"mode": "train"}},
    ):
        assert not build(TrainConfig, settings).fuses_optimizer, settings
