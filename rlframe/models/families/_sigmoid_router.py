"""The experts of DeepSeek-V3 and of families derived from it: sigmoid scores, a bias for the choice, shared experts."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import _mtp
from rlframe.models.families.base import faults_to_error

NEEDED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "norm_topk_prob")
PUBLISHED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Keys that only the models' own code reads."""


def features(
    config: Mapping[str, Any],
    *,
    default_scale: float = 2.5,
    default_groups: tuple[int, int] = (1, 1),
    default_dense: int = 3,
) -> dict[str, Any]:
    """Returns the fields of `Architecture` about experts.

    Args:
        default_scale: value of routed_scaling_factor if config.json has none.
        default_groups: values of n_group and topk_group if it has none.
        default_dense: value of first_k_dense_replace if it has none.

    Raises:
        ConfigError: a key is missing, or Megatron-Core 0.16.1 computes the routing differently.
    """
    # transformers 5 also knows the count as num_local_experts.
    hf: dict[str, Any] = {"n_routed_experts": config.get("num_local_experts"), **config}
    faults_to_error(hf, [f"{key} is missing" for key in NEEDED if hf.get(key) is None])
    chosen = hf["num_experts_per_tok"]
    groups, per_token = (
        hf.get(key, default) or 1 for key, default in zip(("n_group", "topk_group"), default_groups, strict=True)
    )
    faults = []
    if chosen > 1 and not hf["norm_topk_prob"]:
        faults.append("norm_topk_prob must be true: Megatron-Core 0.16.1 always normalises sigmoid scores")
    if chosen == 1 and hf["norm_topk_prob"]:
        faults.append("norm_topk_prob must be false with one expert per token: Megatron-Core 0.16.1 does not normalise")
    if groups > 1 and hf["n_routed_experts"] % groups:
        faults.append(f"n_group {groups} must divide n_routed_experts {hf['n_routed_experts']}")
    if groups > 1 and chosen // per_token != 2:
        faults.append(
            f"num_experts_per_tok {chosen} // topk_group {per_token} must be 2: Megatron-Core 0.16.1 ranks a group by "
            "that many of its experts, the model by 2"
        )
    for key, known in PUBLISHED.items():
        if hf.get(key, known) != known:
            faults.append(f"{key} must be {known}, which is all that transformers computes, got {hf[key]!r:.60}")
    layers, stated, scale = hf["num_hidden_layers"], hf.get("first_k_dense_replace"), hf.get("routed_scaling_factor")
    first = default_dense if stated is None else stated
    kinds = hf.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        faults.append(f"mlp_layer_types must name dense or sparse for each of the {layers} layers, got {kinds!r:.60}")
    faults_to_error(hf, faults)
    return {
        "num_experts": hf["n_routed_experts"],
        "experts_per_token": chosen,
        "expert_ffn_hidden_size": hf["moe_intermediate_size"],
        "shared_ffn_hidden_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
        "sigmoid_router": True,
        "router_groups": groups,
        "router_groups_per_token": per_token,
        "router_scale": float(default_scale if scale is None else scale),
        "moe_layers": tuple(kind == "sparse" for kind in kinds),
        "mtp_layers": _mtp.count(hf, "num_nextn_predict_layers"),
    }
