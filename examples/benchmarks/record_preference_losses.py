"""Records what TRL's preference losses are on random inputs, for tests/unit/algorithms/offline.

    pip install trl==1.16.0 pandas     # in an environment of its own
    python examples/benchmarks/record_preference_losses.py

The trainers' own loss functions run on a model that answers with given logprobs; nothing else of the trainers is built.
The file holds the inputs, TRL's version and the losses. It is read without TRL.
"""

import json
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

FILE = Path(__file__).parents[2] / "tests" / "unit" / "algorithms" / "offline" / "reference_losses_preference.json"
PROMPT_TOKENS = 2
CHOSEN_LENGTHS, REJECTED_LENGTHS = [3, 1, 5, 2], [4, 4, 1, 3]
BETA, SMOOTHING, TEMPERATURE = 0.3, 0.1, 0.4
LD_ALPHA, ALPHA, LOG_SUM_SQUARES = 0.4, 0.25, -0.6
PAIR_LOSSES = [
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm",
]  # fmt: skip


class Given(torch.nn.Module):
    """A model whose logprobs are `rows`, one list per sequence, on its response."""

    is_gradient_checkpointing = False

    def __init__(self, rows: list[list[float]]):
        super().__init__()
        self.rows = rows

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """What TRL reads of a model with a fused head; only the logprobs mean anything."""
        logprobs = torch.zeros(len(self.rows), input_ids.shape[1] - 1, dtype=torch.float64)
        for index, row in enumerate(self.rows):
            logprobs[index, PROMPT_TOKENS - 1 : PROMPT_TOKENS - 1 + len(row)] = torch.tensor(row, dtype=torch.float64)
        unread = torch.zeros_like(logprobs)
        return SimpleNamespace(
            log_probs=logprobs,
            entropy=unread,
            mean_logits=unread,
            is_top1=unread.bool(),
            log_sum_sq_probs=unread + LOG_SUM_SQUARES,
        )


def inputs(rows: list[list[float]], prefix: str = "") -> dict[str, Tensor]:
    """Padded token ids and masks for responses as long as `rows`; which tokens does not matter."""
    lengths = torch.tensor([len(row) for row in rows])
    places = torch.arange(PROMPT_TOKENS + int(lengths.max()))[None]
    inside = places < PROMPT_TOKENS + lengths[:, None]
    return {
        f"{prefix}input_ids": inside.long(),
        f"{prefix}attention_mask": inside.long(),
        f"{prefix}completion_mask": (inside & (places >= PROMPT_TOKENS)).long(),
    }


def trainer(**settings: Any) -> SimpleNamespace:
    """What the loss functions read of a trainer."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        beta=BETA,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def pair_loss(name: str, policy: list[list[float]], reference: list[list[float]], **settings: Any) -> float:
    """Of DPOTrainer; chosen rows, then rejected ones."""
    defaults: dict[str, Any] = {
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "use_weighting": False,
        "loss_types": [name],
        "loss_weights": [1.0],
    }
    mine = trainer(
        ref_model=Given(reference),
        args=SimpleNamespace(
            gradient_checkpointing=False, gradient_checkpointing_kwargs=None, discopop_tau=TEMPERATURE
        ),
        label_smoothing=SMOOTHING,
        **defaults | settings,
    )
    return float(DPOTrainer._compute_loss(mine, Given(policy), inputs(policy), False))


def cpo_loss(name: str, chosen: Tensor, rejected: Tensor, **settings: Any) -> float:
    """Of CPOTrainer, without the likelihood."""
    defaults = {"alpha": 0.0, "loss_type": name, "simpo_gamma": 0.7, "label_smoothing": SMOOTHING}
    return float(CPOTrainer.cpo_loss(trainer(**defaults | settings), chosen, rejected)[0].mean())


def options(policy: list[list[float]], reference: list[list[float]]) -> dict[str, float]:
    """Losses of the trainers' further options."""
    count = len(CHOSEN_LENGTHS)
    sums = torch.tensor([sum(row) for row in policy], dtype=torch.float64)
    means = sums / torch.tensor([len(row) for row in policy])
    divergences = ("forward_kl", "js_divergence")
    return {
        **{name: pair_loss("sigmoid", policy, reference, f_divergence_type=name) for name in divergences},
        "hinge forward_kl": pair_loss("hinge", policy, reference, f_divergence_type="forward_kl"),
        "ld_alpha": pair_loss("sigmoid", policy, reference, ld_alpha=LD_ALPHA),
        "aot ld_alpha": pair_loss("aot", policy, reference, ld_alpha=LD_ALPHA),
        "use_weighting": pair_loss("sigmoid", policy, reference, use_weighting=True),
        "sft": pair_loss("sft", policy, reference),
        "cpo sigmoid": cpo_loss("sigmoid", sums[:count], sums[count:]),
        "cpo hinge": cpo_loss("hinge", sums[:count], sums[count:]),
        "cpo ipo": cpo_loss("ipo", means[:count], means[count:]),
        "simpo alpha": cpo_loss("simpo", means[:count], means[count:], alpha=ALPHA),
    }


def kto_loss(name: str, rows: dict[str, list[list[float]]], labels: list[bool]) -> float:
    """Of KTOTrainer, which asks each model for the mismatched responses and for the batch's."""
    mine = trainer(
        calculate_KL=name == "kto",
        loss_type=name,
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )
    models = {side: Given(rows[side]) for side in ("policy", "reference")}
    mine.ref_model = models["reference"]
    others = {id(models[side]): Given(rows[f"{side}_mismatched"]) for side in models}
    mine._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(mine, others[id(model)], batch)
    batch = inputs(rows["policy"]) | inputs(rows["policy_mismatched"], "KL_") | {"label": torch.tensor(labels)}
    return float(KTOTrainer._compute_loss(mine, models["policy"], batch, False))


def main() -> None:
    """Draw, compute, write."""
    generator = torch.Generator().manual_seed(1)

    def draw(lengths: list[int]) -> list[list[float]]:
        return [(-torch.rand(length, generator=generator) * 2).tolist() for length in lengths]

    lengths = CHOSEN_LENGTHS + REJECTED_LENGTHS
    policy, reference = draw(lengths), draw(lengths)
    count = len(CHOSEN_LENGTHS)
    sums = torch.tensor([sum(row) for row in policy], dtype=torch.float64)
    means = sums / torch.tensor(lengths)
    orpo = ORPOTrainer.odds_ratio_loss(trainer(), means[:count], means[count:])
    kto_lengths, labels = [3, 1, 4, 2, 5], [True, False, False, True, True]
    rows = {"policy": draw(kto_lengths), "reference": draw(kto_lengths)}
    # Responses of other prompts: above the reference on average, so that the estimate is above 0.
    rows |= {"reference_mismatched": draw(kto_lengths)}
    rows["policy_mismatched"] = [[value + 0.4 for value in row] for row in rows["reference_mismatched"]]
    report = {
        "made_by": "examples/benchmarks/record_preference_losses.py",
        "versions": {name: version(name) for name in ("trl", "torch")},
        "settings": {
            "beta": BETA, "label_smoothing": SMOOTHING, "discopop_temperature": TEMPERATURE, "gamma": 0.7,
            "desirable_weight": 1.5, "undesirable_weight": 0.5, "ld_alpha": LD_ALPHA, "alpha": ALPHA,
            "log_sum_squares": LOG_SUM_SQUARES,
        },
        "pairs": {"policy": policy, "reference": reference, "chosen": count},
        "kto": rows | {"desirable": labels},
        "losses": {name: pair_loss(name, policy, reference) for name in PAIR_LOSSES}
        | {"orpo_without_nll": -float(orpo[0].mean()), "simpo": cpo_loss("simpo", means[:count], means[count:])}
        | {name: kto_loss(name, rows, labels) for name in ("kto", "apo_zero_unpaired")},
        "options": options(policy, reference),
    }  # fmt: skip
    FILE.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["losses"] | report["options"], indent=1))


if __name__ == "__main__":
    main()
