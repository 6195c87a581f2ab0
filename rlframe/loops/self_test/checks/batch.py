"""Check: the batch has the tokens of the rollouts."""

from collections.abc import Iterator

import numpy as np

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Seen


class BatchTokens(Check):
    """Every rollout is in the batch once, with its own tokens, rewards and logprobs."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        batch, rollouts = seen.rollout_batch, seen.rollouts
        if batch is None or not rollouts:
            yield skipped("tokens of the batch", "the data is not sampled")
            return
        wrong = sum(
            not np.array_equal(tokens, rollout.token_ids)
            for tokens, rollout in zip(
                (each.numpy() for each in batch.token_ids.split(batch.lengths.tolist())), rollouts, strict=False
            )
        )
        yield found(
            "tokens of the batch",
            f"{batch.num_sequences} sequences of {len(rollouts)} rollouts, {wrong} with other tokens",
            fail=wrong > 0 or batch.num_sequences != len(rollouts),
            threshold="each rollout once, token by token",
            look="the batch that the policy trains on is not what was sampled: packing",
            numbers={"wrong": wrong},
        )
        names = [(each.prompt.id, each.sample_index, each.sequence, each.token_ids.tobytes()) for each in rollouts]
        doubled = len(names) - len(set(names))
        yield found(
            "rollouts once",
            f"{doubled} of {len(names)} come twice",
            fail=False,
            warn=doubled > 0,
            threshold="0",
            look="attempts with the same prompt, index and tokens: a group that is trained on twice, "
            "or a model that always says the same",
            numbers={"doubled": doubled},
        )
        given = np.concatenate([rollout.rollout_logprobs for rollout in rollouts])
        moved = len(given) != batch.num_tokens or not np.array_equal(
            np.where(batch.loss_mask.numpy(), given, 0),
            np.where(batch.loss_mask.numpy(), batch.rollout_logprobs.numpy(), 0),
        )
        yield found(
            "logprobs of the batch",
            "other ones than the engine returned" if moved else "those of the engine, token by token",
            fail=moved,
            threshold="those of the engine",
            look="the engine's logprobs stand at other tokens in the batch",
        )
        rewards = np.array([rollout.reward for rollout in rollouts], np.float32)
        same = np.array_equal(rewards, batch.rewards.numpy(), equal_nan=True)
        yield found(
            "rewards of the batch",
            "those of the rollouts" if same else "other ones than the rollouts have",
            fail=not same,
            threshold="those of the rollouts",
            look="rollouts are trained on with rewards of others",
        )


CHECK = BatchTokens
