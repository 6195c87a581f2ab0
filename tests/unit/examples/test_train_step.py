"""The arithmetic behind the benchmark of training steps."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import models_by_size
import train_step_parts


# Published dimensions, one sequence of 4,096 tokens; GFLOP by the formula, by hand. 4B: a layer has 2*(2*2560*4096 +
# 2*2560*1024) + 2*3*2560*9728 + 2*4096*4096 = 52,428,800 + 149,422,080 + 33,554,432 = 235,405,312; times 36, plus
# 2*2560*151,936 = 777,912,320, times 3: 27.76e9. Qwen3.5-9B, millions: 24 nets of 2*4096*(12,352 + 4,096) = 134.7 and
# a rule of 2*32*(64*5*128 + 3*128*128) = 5.8; 8 attentions of 2*4096*(3*4,096 + 2*1,024) = 117.4 and 2*4,096*4,096 =
# 33.6; 32 MLPs of 2*3*4096*12,288 = 302.0; 2*4096*248,320 = 2,034.2: 16.28 billions, times 3.
@pytest.mark.parametrize(
    ("model", "gflop"),
    [("qwen3_4b", 27.76), ("qwen3_8b", 49.03), ("qwen3_30b_a3b", 23.08), ("qwen3_5_9b", 48.83)],
)
def test_flops_of_a_token(model: str, gflop: float) -> None:
    config = models_by_size.MODELS[model]
    assert train_step_parts.flops_per_token(config, [4096]) / 1e9 == pytest.approx(gflop, abs=0.005)
    # Two sequences of different length: attention sees (3 * 3 + 1 * 1) / 4 = 2.5 tokens on average, not 2.
    uneven = train_step_parts.flops_per_token(config, [3, 1])
    layers = config["num_hidden_layers"] // config.get("full_attention_interval", 1)
    attention = 3 * layers * 2 * config["num_attention_heads"] * config["head_dim"]
    assert uneven - train_step_parts.flops_per_token(config, [2, 2]) == pytest.approx(attention * 0.5)


# Operations of a token that no product is timed for: routers, and the delta rule of 32 heads by chunks.
RULE = 2 * 32 * (64 * 5 * 128 + 3 * 128 * 128)
UNTIMED = {
    "qwen3_4b": 0,
    "qwen3_8b": 0,
    "qwen3_30b_a3b": 2 * 48 * 2048 * 128,
    "qwen3_5_9b": 24 * RULE,
    "qwen3_5_35b_a3b": 2 * 40 * 2048 * 256 + 30 * RULE,
}


@pytest.mark.parametrize("model", UNTIMED)
def test_matrix_products_are_those_of_the_formula(model: str) -> None:
    config = models_by_size.MODELS[model]
    flops = sum(
        3 * 2 * times * rows * inner * cols for times, rows, inner, cols in train_step_parts.products(config, 16384)
    )
    # Attention of a sequence of length 0 leaves the matrix products.
    expected = train_step_parts.flops_per_token(config, [1e-12]) * 16384
    assert flops + 3 * UNTIMED[model] * 16384 == pytest.approx(expected)


def test_kernels_are_grouped_and_gaps_counted() -> None:
    spans = [("nvjet_sm90_tst", 0.0, 2000.0), ("ncclDevKernel_ReduceScatter", 1000.0, 3000.0), ("_gradient", 4e3, 5e3)]
    found = train_step_parts.by_group(spans)
    assert (found["whole_ms"], found["idle_ms"]) == (5.0, 1.0)
    assert found["groups_ms"] == {"matrix products": 2.0, "communication": 2.0, "loss": 1.0}
    assert found["waited_ms"]["loss: _gradient"] == 1.0 == sum(found["waited_ms"].values())
