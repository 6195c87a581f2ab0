"""Faults in what is known of turns, in rewards by turn and by group, in judges and in credit."""

from tests.mutations.mutation import Mutation, faults

CREDIT = "tests/unit/algorithms/test_credit.py"
RECORDS = "tests/unit/attempts/sessions/test_records.py"
REWARDS = "tests/unit/rewards/test_turns_and_groups.py"
JUDGE = "tests/unit/rewards/test_judge.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/ops/turns.py",
        CREDIT,
        (
            "a turn's return is its reward",
            "table[place] += discount * table[place + 1]",
            "table[place] += 0 * table[place + 1]",
        ),
        (
            "returns of turns have no discount",
            "table[place] += discount * table[place + 1]",
            "table[place] += table[place + 1]",
        ),
        (
            "the outcome comes with the first turn",
            'scatter_reduce_(0, self.attempt, torch.arange(len(self.attempt)), "amax")',
            'scatter_reduce_(0, self.attempt, torch.arange(len(self.attempt)), "amin", include_self=False)',
        ),
        (
            "the penalty of a turn is a gain",
            "return rewards - turns.sums(penalty)",
            "return rewards + turns.sums(penalty)",
        ),
        (
            "each sequence is an attempt of its own",
            "return torch.unique(batch.attempt, return_inverse=True)[1]",
            "return torch.arange(batch.num_sequences)",
        ),
        ("turns get advantages where they are not trained on", "return found * batch.loss_mask", "return found"),
    ),
    *faults(
        "rlframe/algorithms/credit.py",
        CREDIT,
        (
            "states of other groups are the same",
            "peers = together(turns.group, turns.state)",
            "peers = together(turns.state)",
        ),
        (
            "states are compared at the same turn",
            "together(turns.group, turns.state)",
            "together(turns.group, turns.place)",
        ),
        (
            "turns of other groups are the same",
            "peers = together(turns.group, turns.place)",
            "peers = together(turns.place)",
        ),
        ("all turns are one turn", "peers = turns.group\n", "peers = together(turns.group, turns.place)\n"),
    ),
    *faults(
        "rlframe/algorithms/policy_gradient.py",
        CREDIT,
        (
            "the turn's advantage beside the attempt's has no weight",
            "self.outcome_advantages(batch) + credit.weight * by_turn",
            "self.outcome_advantages(batch) + by_turn",
        ),
        (
            "the attempt's advantage is left out",
            "self.outcome_advantages(batch) + credit.weight * by_turn",
            "credit.weight * by_turn",
        ),
    ),
    *faults(
        "rlframe/ops/advantages.py",
        CREDIT,
        (
            "rewards at tokens of masked rollouts are forgotten",
            "return batch.rewards + attempt_sums(batch.token_rewards, batch, everywhere=True)",
            "return batch.rewards + attempt_sums(batch.token_rewards, batch)",
        ),
    ),
    *faults(
        "rlframe/ops/packing.py",
        CREDIT,
        (
            "turns of a further sequence count from 0",
            "enumerate(rollout.turns, start=rollout.first_turn)",
            "enumerate(rollout.turns)",
        ),
    ),
    *faults(
        "rlframe/types/rollout.py",
        REWARDS,
        ("values of turns have no weight", "self.reward_weights[name] * (value or 0.0)", "(value or 0.0)"),
        ("values of turns lie after their turns", "found[end - 1] +=", "found[end % self.num_tokens] +="),
    ),
    *faults(
        "rlframe/types/rollout.py",
        RECORDS,
        (
            "values of turns begin anew in each sequence",
            "own = values[self.first_turn : self.num_turns]",
            "own = values[: len(self.turns)]",
        ),
    ),
    *faults(
        "rlframe/attempts/turns.py",
        RECORDS,
        (
            "the turn at which an environment failed is not recorded",
            "if rollout.num_turns > len(rollout.records):",
            "if False:",
        ),
        (
            "of a forked attempt the last two sequences are counted",
            "sampled = rollout.num_sampled_by_attempt",
            "sampled = rollout.num_sampled_tokens",
        ),
    ),
    *faults(
        "rlframe/attempts/dialogue.py",
        RECORDS,
        ("a turn's state is the one after it", "state=state, **seen", 'state=seen["leads_to"], **seen'),
    ),
    *faults(
        "rlframe/rewards/runner.py",
        REWARDS,
        (
            "values of turns count at the end too",
            "0.0 if name in rollout.turn_parts else value",
            "value",
        ),
        (
            "a group's rewards replace those of its attempts",
            "is_new = per is Per.ATTEMPT or not self.parts(Per.ATTEMPT)",
            "is_new = True",
        ),
    ),
    *faults(
        "rlframe/rewards/judge/__init__.py",
        JUDGE,
        (
            "a judge sees a pair in one order only",
            "list(permutations(range(len(attempts)), 2))",
            "[(i, j) for i, j in permutations(range(len(attempts)), 2) if i < j]",
        ),
    ),
    *faults(
        "rlframe/rewards/judge/question.py",
        JUDGE,
        ("what a judge did not score scores 0", "WithoutScore.SKIP: [None]", "WithoutScore.SKIP: [0.0]"),
    ),
    *faults(
        "rlframe/rewards/judge/reading.py",
        JUDGE,
        (
            "a judge's first verdict counts",
            "text: Any = found[-1] if found else None",
            "text: Any = found[0] if found else None",
        ),
        ("a judge's thoughts count", "_, ended, said = reply.rpartition(THOUGHTS)", "ended, said = True, reply"),
        (
            "a judge's number is not brought to 0 to 1",
            "return (number - config.lowest) / (config.highest - config.lowest)",
            "return number",
        ),
    ),
]
