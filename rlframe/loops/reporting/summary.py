"""The closing paragraph of a run."""

import pathlib

import psutil

from rlframe.loops.reporting.advantage_stats import EMPTY, FLAT
from rlframe.loops.reporting.start_up import StartUp

FILES = {
    "model": "model/ (Hugging Face format)",
    "adapter": "adapter/ (PEFT format)",
    "critic": "critic/ (Hugging Face format)",
    "metrics.jsonl": "metrics.jsonl",
    "samples.jsonl": "samples.jsonl",
    "samples": "samples/",
    "report.html": "report.html",
    "profiles": "profiles/",
    "tensorboard": "tensorboard/",
    "checkpoints": "checkpoints/",
    "exports": "exports/",
    "logs": "logs/",
    "config.yaml": "config.yaml",
}
"""Files that a run may leave in its folder, and their descriptions."""

TOLD = ("loss", "accuracy", "reward_margin", "chosen_reward", "desirable_reward", "undesirable_reward")
"""Metrics printed after an offline run, if the loss reports them. The chosen response's reward is included, because a
margin can grow while even chosen responses become less likely."""


def closing_paragraph(
    *,
    name: str,
    steps: int,
    output: str,
    results: dict[str, float],
    phase_totals: dict[str, float],
    start_up: StartUp,
    total_s: float,
    joined: bool,
) -> str:
    """Returns the closing paragraph: what changed, where the time went, and where the files are.

    Args:
        output: folder of the run.
        phase_totals: seconds by phase.
        start_up: what it took until the first step could begin.
        joined: whether the workers are processes of a cluster that was there before, which this one cannot measure.
    """
    phases = sorted(phase_totals.items(), key=lambda pair: -pair[1])
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases)
    whose = "The driver alone holds" if joined else "All processes together hold"
    files = ", ".join(text for name, text in FILES.items() if (pathlib.Path(output) / name).exists())
    return (
        f"{name}: {steps} steps done. {outcome(results)} {in_vain(results)}Start-up took "
        f"{start_up}, the whole run {total_s:.1f} s; by phase: {times}. {whose} "
        f"{held_gigabytes():.1f} GB. In {output}: {files}."
    )


def held_gigabytes() -> float:
    """Returns the memory of this process and all processes under it, including Ray's own. A page that several share
    counts once in all on Linux, and not at all elsewhere."""
    total = 0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            memory = process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += getattr(memory, "pss", memory.uss)
    return total / 1e9


def in_vain(results: dict[str, float]) -> str:
    """Returns a sentence about the steps without a signal, which ends with a space. Empty if there were none."""
    reasons = {FLAT: "whose advantages were all 0", EMPTY: "without a token in the loss"}
    found = [f"{results[key]:.0f} steps {reason}" for key, reason in reasons.items() if results.get(key)]
    return f"There were {' and '.join(found)}. " if found else ""


def outcome(results: dict[str, float]) -> str:
    """Returns the sentence about the run's result."""
    if "first_loss" in results:
        losses = f"The loss went from {results['first_loss']:.4f} to {results['last_loss']:.4f}."
        return f"{losses} {held_out(results)}" if "held_out_items" in results else losses
    if "held_out_items" in results:
        return held_out(results)
    measured = compared(results)
    sets = {key.removesuffix("/reward_mean"): said for key, said in measured.items() if key.endswith("/reward_mean")}
    changes = ", ".join(
        f"{key.replace('_mean', '', 1)} {said}"
        for key, said in measured.items()
        if (first := key.partition("/")[0]).endswith("_mean") and first not in sets
    )
    sentences = [f"{name}: reward {said}." for name, said in sets.items()]
    if changes:
        sentences = [f"Greedy answers to {results['held_out_prompts']:.0f} held-out prompts: {changes}.", *sentences]
    return " ".join(sentences) or "There were no held-out prompts."


def held_out(results: dict[str, float]) -> str:
    """Returns the sentence about the held-out items of an offline run."""
    measured = compared(results)
    changes = ", ".join(f"{name.replace('_', ' ')} {measured[name]}" for name in TOLD if name in measured)
    return f"On {results['held_out_items']:.0f} held-out items: {changes}."


def compared(results: dict[str, float]) -> dict[str, str]:
    """Returns `0.125 before and 0.750 after` by metric, or `0.125` for a run of no steps."""
    before, after = (
        {key.removeprefix(when): value for key, value in results.items() if key.startswith(when)}
        for when in ("before/", "after/")
    )
    if not after:
        return {key: f"{value:.3f}" for key, value in before.items()}
    return {key: f"{value:.3f} before and {after[key]:.3f} after" for key, value in before.items() if key in after}
