"""Families whose layers with a window have rotary positions of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlframe.models.families import _fields, _rope
from rlframe.models.families._decoder import Decoder
from rlframe.models.families.base import Architecture, faults_to_error

KINDS = ("full_attention", "sliding_attention")


class WindowRopeDecoder(Decoder):
    """A decoder whose config.json describes positions by kind of layer. Those of windows have no scaling."""

    windows = True
    window_theta: float
    """Value of rope_theta of the layers with a window if config.json has none."""
    pattern: int
    """Every so many layers one has no window if config.json has no layer_types."""

    def architecture(self, hf: Mapping[str, Any]) -> Architecture:
        everywhere, in_windows = by_kind(hf)
        found = super().architecture(everywhere)
        faults_to_error(hf, _fields.faults(in_windows, required=()))
        faults_to_error(hf, _unread(hf, found))
        rope = _rope.read(in_windows, default_theta=self.window_theta, kinds=("default",), partial=False)
        faults_to_error(hf, [f"of sliding_attention, {fault}" for fault in rope.faults])
        if not any(found.window_layers) or (rope.theta == found.rope_theta and found.rope_scaling is None):
            return found
        return replace(found, window_rope_theta=rope.theta)

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        pattern = hf.get("sliding_window_pattern") or self.pattern
        if not isinstance(pattern, int):
            faults_to_error(hf, [f"sliding_window_pattern must be a whole number, got {pattern!r:.60}"])
        kinds = hf.get("layer_types") or [
            KINDS[bool((layer + 1) % pattern)] for layer in range(hf["num_hidden_layers"])
        ]
        # Both families' configurations in transformers default to 4096.
        window = hf.get("sliding_window", 4096)
        windows = tuple(kind == "sliding_attention" for kind in kinds)
        if any(windows) and not window:
            faults_to_error(hf, [f"sliding_window must be a number of tokens for its layers, got {window}"])
        return {"sliding_window": window or 0, "window_layers": windows if any(windows) else ()}


def by_kind(hf: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns config.json as it would be if all layers were of either kind: without and with a window.

    Raises:
        ConfigError: rope_parameters does not say which kind it is about, so that transformers would not read it, or
            rope_scaling contradicts it.
    """
    given = hf.get("rope_parameters")
    if isinstance(given, dict) and given:
        if not given.keys() <= {*KINDS}:
            faults_to_error(hf, [f"rope_parameters must have the sections {' and '.join(KINDS)}"])
        everywhere = given.get(KINDS[0]) or {}
        if {**everywhere, **(hf.get("rope_scaling") or {})} != everywhere:
            faults_to_error(hf, [_rope.TWO])
        plain = {key: value for key, value in hf.items() if key not in ("rope_theta", "rope_scaling")}
        everywhere, in_windows = ({**plain, "rope_parameters": given.get(kind) or {}} for kind in KINDS)
        return everywhere, in_windows
    in_windows = {**hf, "rope_scaling": None, "rope_theta": hf.get("rope_local_base_freq")}
    return {**hf}, in_windows


def _unread(hf: Mapping[str, Any], found: Architecture) -> list[str]:
    """Returns what config.json says of scaled positions in a form in which transformers does not read it for these
    families."""
    faults = []
    if not hf.get("rope_parameters") and found.rope_scaling and not hf["rope_scaling"].get("rope_type"):
        faults.append("rope_scaling.rope_type is missing, in the place of which transformers does not read type")
    if found.rope_scaling and not found.rope_scaling.get("truncate", True):
        faults.append("rope truncate must be true: transformers does not read it in the sections of rope_parameters")
    return faults
