"""The answer: a table for people, and JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rlframe.tools.explain_gap.ladder import Climb, Step
from rlframe.tools.explain_gap.rung import Rung

NAMED = 0.02
"""Share of the gap from which a rung's remedy is named."""
HEAD = f"{'rung':<34} {'after':>10} {'explains':>9} {'alone':>7} {'k3':>10} {'p99':>9} {'max':>9}"


def table(climb: Climb) -> Iterator[str]:
    """Yields the lines of the table: nats of |trainer - engine| after each rung."""
    first = climb.first
    yield f"mean |trainer - engine| over {first.num_tokens} sampled tokens: {first.mean_nats:.6f} nats"
    yield f"standard error {first.error_nats:.6f}, k3 {first.k3_nats:.3g}, largest {first.max_nats:.4f}"
    yield ""
    yield HEAD
    yield numbers("as configured", first.mean_nats, None, None, first)
    for step in climb.steps:
        yield row(step)
    yield ""
    rest = climb.rest
    if not climb.steps:
        yield "the sides agree, up to the rounding of float32"
        return
    yield f"explained {climb.explained:.1%}; {rest.mean_nats:.6f} nats remain (largest {rest.max_nats:.4f})"


def row(step: Step) -> str:
    """Returns a line of the table."""
    name = " + ".join(step.names)
    if step.after is None:
        return f"{name:<34} not climbed: {step.skipped}"
    line = numbers(name, step.after.mean_nats, step.explained, step.alone, step.after)
    notes = [step.found] if step.found else []
    notes += ["responses drawn again"] if step.drawn_again else []
    return f"{line}  {'; '.join(notes)}".rstrip()


def numbers(name: str, mean: float, explained: float | None, alone: float | None, after: Any) -> str:
    """Returns the columns of a line."""
    shares = ["" if share is None else f"{share:.1%}" for share in (explained, alone)]
    return (
        f"{name:<34} {mean:>10.6f} {shares[0]:>9} {shares[1]:>7} {after.k3_nats:>10.3g} {after.p99_nats:>9.4f} "
        f"{after.max_nats:>9.4f}"
    )


def remedies(climb: Climb, rungs: Sequence[Rung]) -> Iterator[str]:
    """Yields what would remove the causes that matter, the greatest first, with its cost."""
    by_name = {rung.name: rung for rung in rungs}
    for step in sorted(climb.steps, key=lambda step: -step.explained):
        if step.after is not None and step.explained >= NAMED:
            for name in step.names:
                rung = by_name[name]
                yield f"{step.explained:.1%} {name}: {rung.remedy} (cost: {rung.cost})"


def facts(climb: Climb, rungs: Sequence[Rung], **others: Any) -> dict[str, Any]:
    """Returns the answer for programs."""
    by_name = {rung.name: rung for rung in rungs}
    steps = [
        asdict(step)
        | {
            "questions": [by_name[name].question for name in step.names],
            "remedies": [by_name[name].remedy for name in step.names],
            "costs": [by_name[name].cost for name in step.names],
        }
        for step in climb.steps
    ]
    return {
        "statistic": "mean |trainer - engine| in nats over sampled tokens; shares are of the first one",
        "first": asdict(climb.first),
        "steps": steps,
        "rest": asdict(climb.rest),
        "explained": climb.explained,
        **others,
    }
