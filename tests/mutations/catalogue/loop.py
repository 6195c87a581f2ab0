"""Faults in the order of a step and in what surrounds it."""

from tests.mutations.mutation import Mutation, faults

DIALOGUE = "tests/unit/attempts/sessions/test_dialogue.py"
SESSIONS = "tests/unit/attempts/sessions/test_pool.py"
FORKS = "tests/unit/algorithms/test_attempts_of_several_sequences.py"
LOOP = "tests/unit/loops/test_online_loop.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/attempts/runner.py",
        "tests/unit/attempts/test_environments.py",
        ("the limit of a tool is the attempt's", "if not limit.expired():", "if False:"),
    ),
    *faults(
        "rlframe/attempts/turns.py",
        "tests/unit/attempts/test_environments.py",
        (
            "who waits for a reward asks the environment again",
            "                progress.waits_for = WaitsFor.REWARD\n",
            "",
        ),
        (
            "an environment that answers at once takes a turn of the loop",
            "            answer = await dialogue.respond(rollout)\n",
            "            import asyncio\n            await asyncio.sleep(0.01 * rollout.sample_index)\n"
            "            answer = await dialogue.respond(rollout)\n",
        ),
    ),
    *faults(
        "rlframe/attempts/turns.py",
        DIALOGUE,
        (
            "the environment's seed is the attempt's",
            "rollout.prompt.id, ENVIRONMENT, 0)",
            "rollout.prompt.id, rollout.sample_index, 0)",
        ),
        ("a masked attempt is trained on", "reason = DropReason.MASKED", "reason = DONE"),
        (
            "one turn too many",
            "if progress.turn + 1 >= self._config.max_turns:",
            "if progress.turn >= self._config.max_turns:",
        ),
        (
            "a response may exceed the tokens",
            "if before + len(answer.token_ids) + task.sampling.max_tokens > self._most:",
            "if before > self._most:",
        ),
        ("earlier sequences have no reward", "for each in sequences[:-1]:", "for each in sequences[:0]:"),
        (
            "a fork counts its sequences as attempts",
            "sequence, turns = rollout.sequence + 1, rollout.num_turns",
            "sequence, turns = rollout.sequence, rollout.num_turns",
        ),
        (
            "answers are noted before the session has closed",
            "            try:\n                if answer.verdict:\n                    await dialogue.close()\n",
            "            answer.note(rollout)\n            answer = type(answer)(token_ids=answer.token_ids, verdict=answer.verdict, begins_anew=answer.begins_anew)\n            try:\n                if answer.verdict:\n                    await dialogue.close()\n",
        ),
    ),
    *faults(
        "rlframe/attempts/turns.py",
        "tests/unit/attempts/test_turns.py",
        ("a retry keeps its tokens", "                rollout.restart(rollout.prompt.input)\n", ""),
    ),
    *faults(
        "rlframe/attempts/sessions/dialogue.py",
        DIALOGUE,
        ("a response that was cut off is answered", "if rollout.finish_reason is FinishReason.LENGTH:", "if False:"),
        (
            "another session's words are taken for the same",
            "if rollout.token_ids[end:start].tolist() != list(answer.token_ids):",
            "if False:",
        ),
        ("what is not deterministic goes on", "if answered and not self.deterministic:", "if False:"),
    ),
    *faults(
        "rlframe/attempts/sessions/process.py",
        SESSIONS,
        (
            "neighbours are guilty",
            "return Trouble.DIED if session == self._culprit else Trouble.NEIGHBOUR",
            "return Trouble.DIED",
        ),
        ("whoever keeps the process busy is not ended", "if mark[0] != NONE and still_s > limit_s:", "if False:"),
        ("anyone may answer", "        if key != self._spawned.key:\n            return False\n", ""),
    ),
    *faults(
        "rlframe/attempts/sessions/marks.py",
        SESSIONS,
        ("a fork goes on", "if os.getpid() != self._owner:", "if False:"),
    ),
    *faults(
        "rlframe/ops/advantages.py",
        FORKS,
        (
            "each sequence counts in the baseline",
            "        return compute(*values, batch.group)\n    _,",
            "        pass\n    return compute(*values, batch.group)\n    _,",
        ),
        (
            "rewards of other sequences are forgotten",
            "    if batch.attempt is None:\n        return sums\n",
            "    return sums\n",
        ),
    ),
    *faults(
        "rlframe/run/check/loop.py",
        "tests/unit/run/check/test_check_lag.py",
        (
            "engines on shared devices sample ahead",
            "    if run.cluster.colocate and not carries_over(run):",
            "    if False:",
        ),
        ("more is carried over than can be trained on", "elif carries_over(run) and factor > lag + 1:", "elif False:"),
        (
            "every sampler samples ahead",
            'if not algorithm_of(run).requirements.samples_ahead:\n        yield Fault(\n            "loop.max_policy_lag",',
            'if False:\n        yield Fault(\n            "loop.max_policy_lag",',
        ),
    ),
    *faults(
        "rlframe/loops/online.py",
        LOOP,
        (
            "old logprobs are the engine's",
            "batch.old_logprobs = self.policy.logprobs(batch)  # [T]",
            "batch.old_logprobs = batch.rollout_logprobs  # [T]",
        ),
        (
            "old logprobs are the reference's",
            "batch.old_logprobs = self.policy.logprobs(batch)  # [T]",
            "batch.old_logprobs = self.policy.logprobs(batch, reference=True)  # [T]",
        ),
        (
            "old logprobs are never asked for",
            "if self.policy.updates_per_batch > 1 and self.algorithm.needs_old_logprobs:",
            "if False:",
        ),
        (
            "the reference is the live policy",
            "self.policy.logprobs(batch, reference=True)  # [T]",
            "self.policy.logprobs(batch)  # [T]",
        ),
        ("the reference is never asked", "if self.algorithm.needs_reference:", "if False:"),
        (
            "the policy is not trained",
            "if step > self.algorithm.critic_warmup_steps:",
            "if step > self.algorithm.critic_warmup_steps + 1:",
        ),
        (
            "weights are not published",
            "synced = self.publish(version=step)",
            "synced = self.publish(version=1)",
        ),
        (
            "all rollouts are one group",
            "batch = pack(groups,",
            "batch = pack([type(groups[0])(id='', prompt=groups[0].prompt, rollouts=members(groups))],",
        ),
        (
            "weights are published before training",
            "train_batch = self.algorithm.train_batch(batch)  # [T]\n",
            "train_batch = self.algorithm.train_batch(batch)  # [T]\n        synced = self.publish(version=step)\n"
            "        self.publish = lambda version: synced\n",
        ),
    ),
    *faults(
        "rlframe/loops/online.py",
        "tests/unit/loops/test_online_loop.py",
        ("engines are timed by what is trained on", ", untrained=untrained)", ")"),
    ),
    *faults(
        "rlframe/loops/sampling/buffered.py",
        "tests/unit/loops/sampling/test_buffered.py",
        (
            "a resumed run forgets what happened until its checkpoint",
            'self.attempts.recall(held.get("events", {}))',
            "self.attempts.recall({})",
        ),
        (
            "dropped groups are kept",
            "elif self.dynamic and (reason := flat(",
            "elif False and self.dynamic and (reason := flat(",
        ),
        (
            "a batch that is not whole is trained",
            "whole = len(ordinals) // self.num_minibatches * self.num_minibatches",
            "whole = len(ordinals)",
        ),
        ("more rounds than allowed", "else self._counts.rounds < most", "else self._counts.rounds <= most"),
    ),
    *faults(
        "rlframe/loops/sampling/scoring.py",
        "tests/unit/loops/sampling/test_scoring.py",
        ("the reward model has no weight", "before + self.weight * rollout", "before + rollout"),
        ("functions are overwritten", "before = 0.0 if math.isnan(rollout.reward) else rollout.reward", "before = 0.0"),
    ),
    *faults(
        "rlframe/types/rollout.py",
        "tests/unit/rewards/test_runner.py::test_a_reward_is_the_weighted_sum_of_its_parts",
        (
            "parts weigh alike",
            "return sum(weights[name] * value for name, value in parts.items())",
            "return sum(parts.values())",
        ),
    ),
    *faults(
        "rlframe/rewards/runner.py",
        "tests/unit/rewards/test_runner.py",
        (
            "a failed part is right",
            "name: 0.0 if name in failed else outcome",
            "name: 1.0 if name in failed else outcome",
        ),
        ("a failure is not counted", "rollout.reward_failed |= bool(failed)", "rollout.reward_failed |= False"),
    ),
    *faults(
        "rlframe/processes/worker.py",
        "tests/unit/rewards/test_runner.py",
        ("a fork may answer", "if os.getpid() != owner:", "if False:"),
    ),
    *faults(
        "rlframe/processes/pool.py",
        "tests/unit/processes/test_pool.py",
        (
            "a late task is waited for",
            "if not trouble and time.monotonic() > worker.deadline:\n                limit_s",
            "if False:\n                limit_s",
        ),
        ("tasks of a dead worker are lost", "self._waiting.appendleft(rest)", "pass"),
    ),
    *faults(
        "rlframe/rewards/scoring.py",
        "tests/unit/rewards/test_runner.py",
        ("an absurd score is taken", "or not _is_small(number):", "or False:"),
    ),
    *faults(
        "rlframe/loops/restarts.py",
        "tests/unit/loops/test_restarts.py",
        ("nobody looks for deaths at the end", "if deaths := self._deaths():\n", "if deaths := []:\n"),
    ),
    *faults(
        "rlframe/loops/proving.py",
        "tests/unit/loops/test_proving.py",
        ("weights are proved once too often", "step % self._every == 0", "step % self._every in (0, 1)"),
        ("who asks is answered again and again", "self._asked.clear()", ""),
        ("the engines are not asked", "if self._ask_engines:", "if False:"),
    ),
    *faults(
        "rlframe/megatron/proof/constant.py",
        "tests/multiprocess/checkpoint/test_constant_weights.py",
        ("frozen weights may change", "self._digests() != self._noted", "self._noted != self._noted"),
        ("the policy's weights are taken for the reference's", "with self._active():", "with nullcontext():"),
    ),
    *faults(
        "rlframe/utils/files/jsonl.py",
        "tests/unit/utils/files/test_jsonl.py",
        ("resumed steps stay in the file", 'if record["step"] <= done_steps:', "if True:"),
        ("the last kept step is cut", 'if record["step"] <= done_steps:', 'if record["step"] < done_steps:'),
    ),
]
