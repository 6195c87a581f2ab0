"""Rotary positions as config.json describes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN = ("factor", "original_max_position_embeddings")
ORIGINAL = "original_max_position_embeddings"
TWO = (
    "rope_scaling must say what rope_parameters says, which transformers ignores beside it: put its values into "
    "rope_parameters, and remove it"
)
"""The fault of two sections that differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The fields of `Architecture` about rotary positions, and the faults of the others."""

    theta: float
    percent: float
    scaling: dict[str, Any] | None
    faults: list[str]


def read(
    hf: Mapping[str, Any],
    *,
    default_theta: float,
    kinds: tuple[str, ...],
    partial: bool,
    default_partial: float = 1.0,
    default: Mapping[str, Any] = MappingProxyType({}),
) -> Rope:
    """Reads rope_parameters, as transformers 5 writes it, or the two older keys. Where they contradict each other, this
    is a fault: transformers takes rope_scaling alone, without the theta that stands in rope_parameters.

    Args:
        kinds: the values of rope_type that the family knows.
        partial: whether the family may leave part of a head without positions.
        default_partial: the part of a head that has positions if config.json does not say.
        default: the rope_parameters if config.json has neither.
    """
    if hf.get("rope_parameters") and hf.get("rope_scaling"):
        alone = [
            read({**hf, key: None}, default_theta=default_theta, kinds=kinds, partial=partial,
                 default_partial=default_partial)
            for key in ("rope_parameters", "rope_scaling")
        ]  # fmt: skip
        return alone[0] if alone[0] == alone[1] else replace(alone[0], faults=[TWO])
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or default)
    theta = float(rope.pop("rope_theta", None) or hf.get("rope_theta") or default_theta)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    percent = float(rope.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or default_partial)
    faults = [] if partial or percent == 1.0 else [f"partial_rotary_factor must be 1, got {percent}"]
    scaling = None
    if kind not in kinds:
        faults.append(f"rope_type must be {' or '.join(kinds)}, got {kind!r}")
    elif kind == "llama3":
        faults += [f"rope_type llama3 needs {key}" for key in LLAMA3 if rope.get(key) is None]
        scaling = {"rope_type": kind} | {key: rope.get(key) for key in LLAMA3}
    elif kind == "linear":
        faults += [] if rope.get("factor") else ["rope_type linear needs factor"]
        scaling = {"rope_type": kind, "factor": rope.get("factor")}
    elif kind == "yarn":
        faults += _yarn_faults(rope)
        scaling = _yarn(rope)
    within = (scaling or {}).get(ORIGINAL)
    if within and hf.get(ORIGINAL, within) != within:
        # transformers takes the one outside the section.
        faults.append(
            f"{ORIGINAL} must be what rope_parameters or rope_scaling says, {within}, got {hf[ORIGINAL]!r:.60}"
        )
    return Rope(theta=theta, percent=percent, scaling=scaling, faults=faults)


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of Peng et al. 2023, arXiv 2309.00071, with transformers' defaults."""
    # transformers reads mscale only if mscale_all_dim is present too; without them the factor alone decides.
    both = bool(rope.get("mscale") and rope.get("mscale_all_dim"))
    return {
        "rope_type": "yarn",
        "factor": rope.get("factor"),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": rope["mscale"] if both else None,
        "mscale_all_dim": rope["mscale_all_dim"] if both else None,
        "truncate": bool(rope.get("truncate", True)),
    }


def _yarn_faults(rope: Mapping[str, Any]) -> list[str]:
    faults = [f"rope_type yarn needs {key}" for key in YARN if not rope.get(key)]
    given, derived = rope.get("attention_factor"), _attention_factor(rope)
    if given is not None and not math.isclose(given, derived, rel_tol=1e-6):
        faults.append(
            f"rope_type yarn with attention_factor {given} is not supported: Megatron-Core derives {derived:.6g} from "
            "factor"
        )
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        faults.append("rope_type yarn with mscale_all_dim needs mscale")
    return faults


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """Returns the factor of cosines and sines: 0.1 log(factor) + 1, or the ratio of two such numbers."""
    factor = rope.get("factor") or 1.0

    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = rope.get("mscale") and rope.get("mscale_all_dim")
    return of(rope["mscale"]) / of(rope["mscale_all_dim"]) if both else of(1.0)
