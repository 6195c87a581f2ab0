"""The output layer and the embeddings in bfloat16: logprobs with float32 logits are those of products in float32 from
the states, and so are gradients; weight gradients that are added in place are those of autograd."""

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
EMBEDDINGS = "model.embed_tokens.weight"
CASES = {"rounded": (False, None), "float32": (True, None), "by chunks": (True, 7)}
"""Whether logits are in float32, and the tokens of a chunk."""


def start(init_method: str, folder: str, *, float32_logits: bool = False, chunk: int | None = None) -> Any:
    """A trainer of one rank."""
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415 - not in the process of the tests

    return Trainer(TrainerSetup(
        init_method=init_method, device=torch.device("cpu"), seed=0, temperature=TEMPERATURE, timeout_s=60,
        model=ModelConfig(path=folder, float32_logits=float32_logits),
        train=TrainConfig(dtype="bfloat16", logits_chunk_tokens=chunk), total_optimizer_steps=1, with_reference=False,
    ))  # fmt: skip


def on_rank(rank: int, init_method: str, folder: str, tied: str) -> dict[str, dict[str, Any]]:
    """By case logprobs and the gradient of the output layer, and what products in double precision say of both; and
    `in_place` of these and of a model with tied embeddings."""
    from rlframe.megatron.model import forward
    from rlframe.megatron.worker import parallel

    found: dict[str, dict[str, Any]] = {}
    for name, (float32_logits, chunk) in CASES.items():
        trainer = start(f"{init_method}-{name}", folder, float32_logits=float32_logits, chunk=chunk)
        (microbatch,) = microbatches(1000)
        layer, seen = trainer.model.chunks[0].module.output_layer, []
        # Before the tokens of the loss are picked.
        hook = layer.register_forward_pre_hook(
            lambda _, arguments, seen=seen: seen.append(arguments[0].detach()), prepend=True
        )
        (logprobs,) = trainer.logprobs([microbatch], reference=False)
        forward.accumulate_gradients(trainer.model, [microbatch], Weighted(), temperature=TEMPERATURE)
        ((_, gradient),) = exported_gradients(trainer)[HEAD]
        hook.remove()
        weight = layer.weight.detach()[: trainer.model.architecture.vocab_size]
        expected = from_states(seen[0].squeeze(1), weight, microbatch)
        found[name] = {"logprobs": logprobs, "gradient": gradient.view_as(weight), **expected}
        found[name] |= in_place(trainer, fuses=name == "rounded")
        parallel.shutdown()
    found["tied"] = in_place(start(f"{init_method}-tied", tied), fuses=True)
    parallel.shutdown()
    return found


def microbatches(max_tokens: int) -> list[Any]:
    """The micro-batches of a step."""
    batch = sequences()
    ((share,), _) = split(batch, weights_of(batch), num_ranks=1, max_tokens=max_tokens)
    return share.microbatches()


def in_place(trainer: Any, *, fuses: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of the vocabulary's weights after several micro-batches, by autograd and added in place.

    Args:
        fuses: whether the output layer's are, too: it has no way of its own.
    """
    from rlframe.megatron.model import forward  # noqa: PLC0415 - not in the process of the tests
    from rlframe.megatron.vocab import in_place  # noqa: PLC0415

    calls = []

    def added(states: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        calls.append(total)
        total.addmm_(grad.t().to(total.dtype), states.to(total.dtype))

    # In the place of Transformer Engine's product, which needs a GPU.
    in_place.WeightGradients.wgrad_gemm_accum_fp32 = staticmethod(added)
    some, found = microbatches(30), {}
    assert len(some) > 1
    for way in ("autograd", "in_place"):
        forward.accumulate_gradients(trainer.model, some, Weighted(), temperature=TEMPERATURE)
        gradients = exported_gradients(trainer)
        found[way] = {name: gradients[name][0][1] for name in (HEAD, EMBEDDINGS) if name in gradients}
        if way == "autograd":
            module = trainer.model.chunks[0].module
            in_place.add_in_place(module, overlaps=False, in_float32=False)
            # Into a buffer of 16 bits each row would be rounded.
            assert "forward" not in vars(module.embedding.word_embeddings)
            in_place.add_in_place(module, overlaps=False, in_float32=True)
    assert len(calls) == (len(some) if fuses else 0)
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
    return {"expected_logprobs": logprobs.detach().float() * batch.loss_mask, "expected_gradient": weight.grad.float()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """See `on_rank`."""
    folder: Path = tmp_path_factory.mktemp("model")
    tied: Path = tmp_path_factory.mktemp("tied")
    make("qwen3", folder)
    make("qwen3_tied", tied)
    (found,) = run_distributed(on_rank, 1, str(folder), str(tied))
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


@pytest.mark.parametrize("case", [*CASES, "tied"])
def test_gradients_that_are_added_in_place_are_those_of_autograd(found: Any, case: str) -> None:
    autograd, added = found[case]["autograd"], found[case]["in_place"]
    assert autograd.keys() == added.keys() == ({EMBEDDINGS} if case == "tied" else {HEAD, EMBEDDINGS})
    for name, gradient in autograd.items():
        apart = float((added[name] - gradient).norm() / gradient.norm())
        # Autograd rounds each micro-batch's to 8 bits, unless the output layer has a way of its own.
        assert apart < 2**-8 and (apart > 0 or name == HEAD), (name, apart)
