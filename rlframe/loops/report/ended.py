"""The ends of a run's data: trained on, thrown away for a reason, or under way."""

from collections import Counter
from pathlib import Path
from typing import Any

from rlframe.attempts.account.ledger import LEDGER, Dropped, DropReason, Leased, Trained, open_among, read_ledger
from rlframe.utils.errors import CheckpointError

REASONS = {
    DropReason.FLAT_ALL_RIGHT: "each attempt was right: nothing to learn",
    DropReason.FLAT_ALL_WRONG: "each attempt was wrong: nothing to learn",
    DropReason.FLAT_OTHER: "each attempt got the same reward: nothing to learn",
    DropReason.FLAT_UNSCORED: "no reward scored any attempt",
    DropReason.LEFT_OVER: "the batch was full without it",
    DropReason.PASSED_OVER: "the curriculum left the prompt out",
    DropReason.OVERSAMPLED: "the step had enough groups without it",
    DropReason.TIMED_OUT: "took too long",
    DropReason.FAILED: "the environment failed",
    DropReason.MASKED: "the environment said that it must not be trained on",
    DropReason.UNSUCCESSFUL: "too few attempts became rollouts",
}
"""Meanings of the reasons, in a few words."""


def ended(output: Path) -> dict[str, Any]:
    """Returns how many prompts, and sampled tokens, ended how. Empty if the run has no ledger, or a damaged one."""
    if not (output / LEDGER).exists():
        return {}
    try:
        account = read_ledger(output)
    except CheckpointError as error:
        return {"trouble": str(error)}
    groups: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for event in account.events:
        if isinstance(event, Trained):
            groups["trained"] += 1
            tokens["trained"] += sum(event.tokens)
            for reason, lengths in event.lost.items():
                lost[reason] += len(lengths)
        elif isinstance(event, Dropped):
            groups[event.reason] += 1
            tokens[event.reason] += event.tokens
    rows = [
        {"reason": name, "meaning": _meaning(name), "groups": count, "tokens": tokens[name]}
        for name, count in groups.most_common()
    ]
    return {
        "leased": sum(isinstance(event, Leased) for event in account.events),
        "in_flight": len(open_among(account.events)),
        "rows": rows,
        "lost_attempts": dict(lost),
    }


def _meaning(reason: str) -> str:
    if reason == "trained":
        return "the policy was trained on it"
    return REASONS.get(DropReason(reason), "") if reason in set(DropReason) else ""
