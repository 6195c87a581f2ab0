"""Losses, gradients and advantages of TRL and verl on fixed random inputs, for a test that compares ours with them.

    python -m venv reference && reference/bin/pip install trl==1.16.0 verl==0.9.1
    reference/bin/python examples/benchmarks/record_reference_losses.py tests/unit/algorithms/reference_losses.json

Their own functions compute, on the CPU: verl's of `trainer/ppo/core_algos.py` and `rollout_corr_helper.py`, and TRL's
`GRPOTrainer._compute_loss`, called with the logprobs in place of a model. Eight rollouts of two prompts, of up to seven
response tokens; one has a hole in its mask, as an observation between two turns makes it. rlframe is not imported.
"""

import json
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOTrainer
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig, PolicyLossConfig

LENGTHS = [7, 3, 5, 1, 6, 2, 7, 4]
LONGEST, GROUP_SIZE = 7, 4
HOLE = (0, 3)
Result = dict[str, Any]


def make_inputs() -> dict[str, Tensor]:
    """Random logprobs, far enough apart that every bound is met somewhere; 0 where the mask is."""
    generator = torch.Generator().manual_seed(20)
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).float()
    mask[HOLE] = 0.0

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(LENGTHS), LONGEST, generator=generator)

    logprobs = -noise(1.0).abs() - 0.1
    inputs = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + noise(0.5),
        "rollout_logprobs": logprobs + noise(0.5),
        "reference_logprobs": logprobs + noise(0.5),
        "advantages": torch.randn(len(LENGTHS), 1, generator=generator).expand(-1, LONGEST),
        "values": noise(1.0),
        "new_values": noise(1.0),
        "token_advantages": noise(1.0),
        "entropies": noise(1.0).abs(),
    }
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0, 2.0, 1.0, 0.125])
    inputs["possible_old_logprobs"] = inputs["old_logprobs"].clamp(max=-0.05)
    return {name: value * mask for name, value in inputs.items()} | {"mask": mask, "rewards": rewards}


INPUTS = make_inputs()
ENGINE_RATIO = (INPUTS["old_logprobs"] - INPUTS["rollout_logprobs"]).exp()
REJECTIONS = {
    "token_k2": "0.1",
    "token_k3": "0.1",
    "seq_sum_k2": "1.0",
    "seq_sum_k3": "1.0",
    "seq_mean_k2": "0.12",
    "seq_mean_k3": "0.12",
    "seq_max_k2": "0.4",
    "seq_max_k3": "0.4",
    "token_k1,seq_mean_k1": "0.5_2,0.8_1.25",
}
"""verl's rollout_rs and rollout_rs_threshold; its k1 bounds are on engine / trainer."""


def with_gradient(logprobs: Tensor, loss: Tensor) -> Result:
    """A loss and its gradient by the logprobs."""
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def verl_loss(
    name: str,
    mode: str,
    *,
    weights: Tensor | None = None,
    old: str = "old_logprobs",
    advantages: str = "advantages",
    policy_loss: dict[str, float] | None = None,
    **settings: float,
) -> Result:
    """One of verl's policy losses, aggregated by `mode`."""
    # Its checks want a whole training job; the losses look at these fields only.
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        **settings,
    )
    if mode == "seq-mean-token-sum-norm":
        config.global_batch_info["loss_scale_factor"] = LONGEST
    logprobs = INPUTS["logprobs"].clone().requires_grad_()
    loss, _ = verl.get_policy_loss_fn(name)(
        old_log_prob=INPUTS[old],
        log_prob=logprobs,
        # Some of verl's losses write into what they are given.
        advantages=INPUTS[advantages].clone(),
        response_mask=INPUTS["mask"],
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    return with_gradient(logprobs, loss)


def verl_losses() -> dict[str, Result]:
    """By name: clipped losses by aggregation and by correction, GSPO, CISPO, SAPO."""
    ppo = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
    modes = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
    results = {f"ppo {mode}": verl_loss("vanilla", mode, **ppo) for mode in modes}
    for level in ("token", "sequence"):
        for threshold in ("1.5", "0.5_1.5"):
            weights, _ = compute_rollout_correction_weights(
                INPUTS["old_logprobs"] - INPUTS["rollout_logprobs"],
                INPUTS["mask"],
                rollout_is=level,
                rollout_is_threshold=threshold,
            )
            results[f"ppo {level} {threshold}"] = verl_loss("vanilla", "token-mean", weights=weights, **ppo)
    gspo = {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
    results["gspo"] = verl_loss("gspo", "seq-mean-token-mean", **gspo)
    results["gspo token"] = verl_loss("gspo", "seq-mean-token-mean", advantages="token_advantages", **gspo)
    cispo = {"clip_ratio": 0.2, "clip_ratio_low": 0.3, "clip_ratio_high": 0.4}
    results["cispo"] = verl_loss("cispo", "token-mean", **cispo)
    results["sapo"] = verl_loss("sapo", "seq-mean-token-mean", tau_pos=1.0, tau_neg=1.05)
    gmpo = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    results["gmpo"] = verl_loss("geo_mean", "not used", **gmpo)
    for divergence, low, high in (("tv", 0.03, 0.05), ("kl", 0.01, 0.02)):
        limits = {"clip_ratio": 0.2, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 1.3}
        results[f"dppo {divergence}"] = verl_loss(
            f"dppo_{divergence}", "token-mean", old="possible_old_logprobs", **limits
        )
    return results | verl_corrected(ppo) | verl_covariances(ppo)


def verl_covariances(ppo: Result) -> dict[str, Result]:
    """Clip-Cov with no more candidates than are drawn, and KL-Cov."""
    clip = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.6}
    advantages = {"advantages": "token_advantages"}
    return {
        "clip_cov": verl_loss("clip_cov", "token-mean", policy_loss=clip, **advantages, **ppo),
        "kl_cov": verl_loss(
            "kl_cov", "token-mean", policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}, **advantages, **ppo
        ),
    }


def verl_corrected(ppo: Result) -> dict[str, Result]:
    """Clipped losses with normalised weights, with rejection by each statistic, and in bypass.

    What is rejected has weight 0, so that the denominators stay.
    """
    results = {}
    gap = INPUTS["old_logprobs"] - INPUTS["rollout_logprobs"]
    for level in ("token", "sequence"):
        weights, _ = compute_rollout_correction_weights(
            gap, INPUTS["mask"], rollout_is=level, rollout_is_threshold=1.5, rollout_is_batch_normalize=True
        )
        results[f"ppo {level} 1.5 normalised"] = verl_loss("vanilla", "token-mean", weights=weights, **ppo)
    for options, thresholds in REJECTIONS.items():
        kept, _ = compute_rollout_rejection_mask(gap, INPUTS["mask"], options, thresholds)
        results[f"ppo rejected {options}"] = verl_loss("vanilla", "token-mean", weights=kept, **ppo)
    moved = INPUTS["logprobs"] - INPUTS["rollout_logprobs"]
    kept, _ = compute_rollout_rejection_mask(moved, INPUTS["mask"], "seq_mean_k1", "0.9_1.25")
    results["ppo bypass"] = verl_loss("vanilla", "token-mean", weights=kept, old="rollout_logprobs", **ppo)
    return results


def verl_kl(name: str, *, times: float = 1.0) -> Result:
    """The mean over tokens of an estimate of the KL to the reference, which is put `times` as far away."""
    logprobs = INPUTS["logprobs"].clone().requires_grad_()
    reference = INPUTS["logprobs"] + times * (INPUTS["reference_logprobs"] - INPUTS["logprobs"])
    kl = verl.kl_penalty(logprobs, reference, name)
    return with_gradient(logprobs, (kl * INPUTS["mask"]).sum() / INPUTS["mask"].sum())


def verl_advantages() -> dict[str, list]:
    """By algorithm, on every token."""
    rewards = torch.zeros(len(LENGTHS), LONGEST)
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = INPUTS["rewards"]
    index = np.arange(len(LENGTHS)) // GROUP_SIZE
    given = {"token_level_rewards": rewards, "response_mask": INPUTS["mask"]}
    grpo = verl.compute_grpo_outcome_advantage
    penalty = verl.kl_penalty(INPUTS["old_logprobs"], INPUTS["reference_logprobs"], "kl") * INPUTS["mask"]
    results = {
        "grpo": grpo(**given, index=index),
        "dr_grpo": grpo(**given, index=index, norm_adv_by_std_in_grpo=False),
        "rloo": verl.compute_rloo_outcome_advantage(**given, index=index),
        "grpo kl in the reward": grpo(**given | {"token_level_rewards": rewards - 0.1 * penalty}, index=index),
        "reinforce_plus_plus": verl.compute_reinforce_plus_plus_outcome_advantage(
            **given, config=SimpleNamespace(gamma=0.9)
        ),
        "reinforce_plus_plus_baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            **given, index=index
        ),
    }
    return {name: advantages.tolist() for name, (advantages, _) in results.items()}


def verl_critic() -> Result:
    """Whitened advantages, returns, and by aggregation the clipped loss of the new values with its gradient."""
    rewards = torch.zeros(len(LENGTHS), LONGEST)
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = INPUTS["rewards"]
    mask, values = INPUTS["mask"], INPUTS["values"]
    advantages, returns = verl.compute_gae_advantage_return(rewards, values, mask, gamma=0.9, lam=0.8)
    result: Result = {"advantages": (advantages * mask).tolist(), "returns": (returns * mask).tolist()}
    for mode in ("token-mean", "seq-mean-token-mean"):
        new_values = INPUTS["new_values"].clone().requires_grad_()
        loss, _ = verl.compute_value_loss(
            new_values, returns * mask, values, mask, cliprange_value=0.5, loss_agg_mode=mode
        )
        result[mode] = with_gradient(new_values, loss)
    return result


def trl_batch(weights: Tensor | None) -> dict[str, Any]:
    """What TRL's loss is given besides the model's logprobs."""
    nothing = torch.zeros(len(LENGTHS), 0)
    return {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": INPUTS["mask"],
        "completion_mask": INPUTS["mask"],
        "advantages": INPUTS["advantages"][:, 0],
        "old_per_token_logps": INPUTS["old_logprobs"],
        "ref_per_token_logps": INPUTS["reference_logprobs"],
        "num_items_in_batch": INPUTS["mask"].sum(),
        "importance_sampling_ratio": weights,
        "sampling_per_token_logps": INPUTS["rollout_logprobs"],
    }


def trl_loss(
    loss_type: str,
    *,
    level: str = "token",
    high: float = 0.28,
    beta: float = 0.0,
    weights: Tensor | None = None,
    off_policy: float | None = None,
    top_entropy: float = 1.0,
    **options: Any,
) -> Result:
    """TRL's loss of the batch, as it evaluates it: without gradient accumulation.

    Args:
        weights: its importance_sampling_ratio.
        off_policy: its off_policy_mask_threshold.
        top_entropy: its top_entropy_quantile.
    """
    logprobs = INPUTS["logprobs"].clone().requires_grad_()
    settings = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1} | options
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda value: value,
        pad_across_processes=lambda value, **_: value,
        reduce=lambda value, reduction: value,
        sync_gradients=True,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, INPUTS["entropies"], None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=False,
        accelerator=accelerator,
        args=SimpleNamespace(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, **settings),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_low=0.2,
        epsilon_high=high,
        importance_sampling_level=level,
        loss_type=loss_type,
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=False),
        off_policy_mask_threshold=off_policy,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_high_entropy_mask=lambda *given: GRPOTrainer.get_high_entropy_mask(trainer, *given),
        top_entropy_quantile=top_entropy,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
    )
    return with_gradient(logprobs, GRPOTrainer._compute_loss(trainer, None, trl_batch(weights)))


def main() -> None:
    """Write everything to the file named on the command line."""
    record = {
        "versions": {name: version(name) for name in ("trl", "verl", "torch")},
        "group_size": GROUP_SIZE,
        "constant_length": LONGEST,
        "inputs": {name: value.tolist() for name, value in INPUTS.items()},
        "verl": verl_losses(),
        "verl_kl": {name: verl_kl(name) for name in ("k1", "k2", "k3", "k3+")}
        | {f"{name} far": verl_kl(name, times=10.0) for name in ("k3", "k3+")},
        "verl_advantages": verl_advantages(),
        "verl_critic": verl_critic(),
        "trl": {
            "grpo": trl_loss("grpo"),
            "dr_grpo": trl_loss("dr_grpo"),
            "dapo": trl_loss("dapo"),
            "dapo delta": trl_loss("dapo", delta=1.5),
            "dapo delta below": trl_loss("dapo", delta=1.1),
            "dapo top entropy": trl_loss("dapo", beta=0.1, top_entropy=0.3),
            "dapo off-policy mask": trl_loss("dapo", off_policy=0.1),
            "dapo clamped weights": trl_loss("dapo", weights=ENGINE_RATIO.clamp(0.8, 1.5)),
            "grpo kl": trl_loss("grpo", beta=0.1),
            "grpo weighted kl": trl_loss("grpo", beta=0.1, use_bias_correction_kl=True),
            "gspo": trl_loss("grpo", level="sequence"),
            # epsilon_high is the cap itself here.
            "cispo": trl_loss("cispo", high=1.4),
            "sapo": trl_loss("sapo"),
        },
    }
    Path(sys.argv[1]).write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
