"""Check: the loss counts exactly the sampled tokens."""

from collections.abc import Iterator, Sequence

import numpy as np

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Seen
from rlframe.types.batch import Batch
from rlframe.types.rollout import OFFLINE_VERSION, FinishReason, Rollout


class Mask(Check):
    """The response mask has every sampled token, its end token included, and no other one."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        if seen.batch is not None and seen.token_weights is not None:
            yield weights_of_tokens(seen)
        batch, rollouts = seen.rollout_batch, seen.rollouts
        if batch is None or not rollouts:
            yield skipped("mask", "the data is not sampled")
            return
        yield of_rollouts(batch, rollouts)
        yield ends(seen)


def weights_of_tokens(seen: Seen) -> Finding:
    """Returns whether exactly the tokens of the mask have a weight in the loss."""
    assert seen.batch is not None and seen.token_weights is not None
    weights, mask = seen.token_weights, seen.batch.loss_mask
    outside = int((weights[~mask] != 0).sum())
    without = int((weights[mask] == 0).sum())
    bad = int((~weights.isfinite() | (weights < 0)).sum())
    return found(
        "weights in the loss",
        f"{int(mask.sum())} tokens, sum of weights {float(weights.double().sum()):.6g}; {outside} outside the mask, "
        f"{without} of weight 0",
        fail=outside > 0 or bad > 0,
        warn=without > 0,
        threshold="a finite weight above 0 in the mask, 0 outside",
        look="algorithm.token_weights: tokens that count although nobody sampled them, or not although somebody did",
        numbers={"outside": outside, "without": without, "not_finite": bad},
    )


def of_rollouts(batch: Batch, rollouts: Sequence[Rollout]) -> Finding:
    """Returns whether the mask has the tokens after the prompt that some version of the policy sampled."""
    extra = missing = prompts = 0
    masks = batch.loss_mask.split(batch.lengths.tolist())
    for mask, rollout in zip((each.numpy() for each in masks), rollouts, strict=False):
        sampled = rollout.versions != OFFLINE_VERSION
        prompt = prompt_tokens(rollout)
        sampled[:prompt] = False
        size = min(len(mask), len(sampled))
        extra += int((mask[:size] & ~sampled[:size]).sum())
        # A whole rollout may be left out on purpose, such as one that was cut off.
        missing += int((~mask[:size] & sampled[:size]).sum()) if mask.any() else 0
        prompts += int(mask[:prompt].sum())
    return found(
        "mask of sampled tokens",
        f"{extra} tokens too many ({prompts} of prompts), {missing} too few",
        fail=bool(extra or missing),
        threshold="exactly the sampled tokens",
        look="the loss counts tokens that the policy did not sample, or leaves out some that it did",
        numbers={"extra": extra, "missing": missing},
    )


def prompt_tokens(rollout: Rollout) -> int:
    """Returns the number of tokens of the prompt with which a rollout begins. 0 if it is the conversation of an
    environment, which may be shorter."""
    prompt = rollout.prompt.input.token_ids
    return len(prompt) if np.array_equal(rollout.token_ids[: len(prompt)], prompt) else 0


def ends(seen: Seen) -> Finding:
    """Returns whether responses that ended by themselves end with their end token."""
    ended = [each for each in seen.rollouts if each.finish_reason is FinishReason.STOP and each.loss_mask.any()]
    if not ended or not seen.facts.stop_tokens:
        return skipped("end tokens", "no response has ended by itself")
    open_ends = sum(not _ends_well(each, seen) for each in ended)
    return found(
        "end tokens",
        f"{len(ended)} responses ended by themselves, {open_ends} without an end token",
        fail=open_ends > 0,
        threshold="0 without",
        look="the token that ends a response was dropped: the policy never learns to stop",
        numbers={"open": open_ends},
    )


def _ends_well(rollout: Rollout, seen: Seen) -> bool:
    """Returns whether the last sampled token ends a response. With stop strings other tokens may."""
    last = int(rollout.token_ids[np.flatnonzero(rollout.loss_mask)[-1]])
    return last in seen.facts.stop_tokens or bool(seen.facts.stop_strings)


CHECK = Mask
