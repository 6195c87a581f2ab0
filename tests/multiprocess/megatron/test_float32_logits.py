"""In bfloat16, logprobs with float32 logits are those of products in float32 from the states, and so are gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.models.config import ModelConfig
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.gradients.ranks import exported_gradients
from tests.multiprocess.megatron.test_layouts import Weighted, sequences, weights_of
from tests.tiny_models import make

TEMPERATURE = 0.7
HEAD = "lm_head.weight"
CASES = {"rounded": (False, None), "float32": (True, None), "by chunks": (True, 7)}
"""Whether logits are in float32, and the tokens of a chunk."""


def on_rank(rank: int, init_method: str, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """By case logprobs and the gradient of the output layer, and what products in double precision say of both."""
    from rlframe.megatron.model import forward
    from rlframe.megatron.worker import parallel
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup

    found = {}
    for name, (float32_logits, chunk) in CASES.items():
        trainer = Trainer(TrainerSetup(
            init_method=f"{init_method}-{name}", device=torch.device("cpu"), seed=0, temperature=TEMPERATURE,
            model=ModelConfig(path=folder, float32_logits=float32_logits),
            train=TrainConfig(dtype="bfloat16", logits_chunk_tokens=chunk), total_optimizer_steps=1, timeout_s=60,
            with_reference=False,
        ))  # fmt: skip
        batch = sequences()
        ((share,), _) = split(batch, weights_of(batch), num_ranks=1, max_tokens=1000)
        (microbatch,) = share.microbatches()
        layer, seen = trainer.model.chunks[0].module.output_layer, []
        layer.register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(arguments[0].detach()))
        (logprobs,) = trainer.logprobs([microbatch], reference=False)
        forward.accumulate_gradients(trainer.model, [microbatch], Weighted(), temperature=TEMPERATURE)
        ((_, gradient),) = exported_gradients(trainer)[HEAD]
        weight = layer.weight.detach()[: trainer.model.architecture.vocab_size]
        expected = from_states(seen[0].squeeze(1), weight, microbatch)
        found[name] = {"logprobs": logprobs, "gradient": gradient.view_as(weight), **expected}
        parallel.shutdown()
    return found


def from_states(states: torch.Tensor, weight: torch.Tensor, microbatch: Any) -> dict[str, torch.Tensor]:
    """Logprobs, and the gradient of the weight in the loss of `Weighted`."""
    weight, batch = weight.double().requires_grad_(), microbatch.batch
    table = (states.double() @ weight.t() / TEMPERATURE).log_softmax(-1)
    predicted = table[:-1].gather(1, batch.token_ids[1:, None])[:, 0]
    first = torch.cumsum(batch.lengths, 0) - batch.lengths
    logprobs = torch.cat([predicted.new_zeros(1), predicted]).index_fill(0, first, 0.0)
    (-(microbatch.weights * logprobs).sum()).backward()
    assert weight.grad is not None
    return {"expected_logprobs": logprobs.detach().float(), "expected_gradient": weight.grad.float()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """See `on_rank`."""
    folder: Path = tmp_path_factory.mktemp("model")
    make("qwen3", folder)
    (found,) = run_distributed(on_rank, 1, str(folder))
    return found


@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_of_logits_that_nothing_rounds(found: Any, case: str) -> None:
    worst = (found[case]["logprobs"] - found[case]["expected_logprobs"]).abs().max()
    assert worst < 1e-5 if CASES[case][0] else worst > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_rounded_slopes(found: Any, case: str) -> None:
    expected = found[case]["expected_gradient"]
    # Slopes have 8 bits, and so has the sum over tokens in the weight's number format.
    assert (found[case]["gradient"] - expected).abs().max() < 0.01 * expected.abs().max()
