"""Records what ms-swift and verl make of a teacher's top k, for tests/unit/megatron/vocab/test_top_k.py.

    pip install ms-swift==4.6.0 verl==0.9.1     # in an environment of its own
    python examples/benchmarks/record_top_k_losses.py

Their own functions compute, on the CPU: `swift.rlhf_trainers.gkd_loss.gkd_loss`, which renormalises both models over
the k tokens, and `verl.trainer.distillation.fsdp.losses`, which leaves the rest out. The file holds the inputs, the
versions and the losses with their gradients. It is read without either.
"""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from swift.rlhf_trainers.gkd_loss import TeacherOutput, gkd_loss
from torch import Tensor
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

FILE = Path(__file__).parents[2] / "tests" / "unit" / "megatron" / "reference_losses_top_k.json"
NUM_TOKENS, VOCAB_SIZE, K, TEMPERATURE = 4, 9, 3, 0.7
BETAS = [0.0, 0.3, 1.0]


def swift(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Summed over tokens."""
    top = torch.log_softmax(teacher, 1).topk(K, dim=1)
    output = TeacherOutput(
        topk_logprobs=top.values[None],
        topk_indices=top.indices[None],
        labels=torch.zeros(1, NUM_TOKENS, dtype=torch.int64),
    )
    return gkd_loss(student[None], output, output.labels, beta, TEMPERATURE)[0]


def verl(student: Tensor, teacher: Tensor) -> Tensor:
    """Summed over tokens, at temperature 1 and beta 0; without clamps."""
    top = torch.log_softmax(teacher, 1).topk(K, dim=1)
    nested = [torch.nested.as_nested_tensor([each], layout=torch.jagged) for each in (top.values, top.indices)]
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=False))
    result: Any = compute_forward_kl_topk(student[None], *nested, config, "thd")
    return result["distillation_losses"].sum()


def main() -> None:
    """Draws, computes, writes."""
    generator = torch.Generator().manual_seed(7)
    student, teacher = (3 * torch.randn(NUM_TOKENS, VOCAB_SIZE, generator=generator) for _ in range(2))

    def recorded(function: Any, *arguments: Any) -> dict[str, Any]:
        logits = student.clone().requires_grad_()
        loss = function(logits, teacher, *arguments)
        loss.backward()
        assert logits.grad is not None
        return {"loss": loss.item(), "gradient": logits.grad.tolist()}

    report = {
        "made_by": "examples/benchmarks/record_top_k_losses.py",
        "versions": {name: version(name) for name in ("ms-swift", "verl", "torch")},
        "k": K,
        "temperature": TEMPERATURE,
        "student": student.tolist(),
        "teacher": teacher.tolist(),
        "ms-swift": {str(beta): recorded(swift, beta) for beta in BETAS},
        "verl": recorded(verl),
    }
    FILE.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
