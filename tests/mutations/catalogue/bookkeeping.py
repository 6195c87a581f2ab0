"""Faults in who owns what is in flight: leases, the buffer, the runner and its engines, restarts and checkpoints."""

from tests.mutations.mutation import Mutation, faults

SIMULATED = "tests/campaigns/samples/test_nothing_lost.py::test_nothing_is_lost_or_doubled_and_the_lag_is_kept[0]"
ALL_SEEDS = "tests/campaigns/samples/test_nothing_lost.py"
OVERSAMPLED = "tests/campaigns/samples/test_nothing_lost.py::test_so_it_is_with_groups_that_a_step_does_not_wait_for[0]"
OVERSAMPLING = "tests/unit/loops/sampling/test_oversampling.py"
BUFFER = "tests/unit/attempts/test_buffer.py"
RUNNER = "tests/unit/attempts/test_runner.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/attempts/buffer.py",
        BUFFER,
        ("room forgets the groups that are trained on", "- len(self._open) - len(self._taken)", "- len(self._open)"),
    ),
    *faults(
        "rlframe/attempts/buffer.py",
        SIMULATED,
        ("a taken group is put back", "self._finished.pop(each) for each", "self._finished[each] for each"),
        (
            "the test of feasibility is off by one",
            "steps = begun + self.max_policy_lag - version",
            "steps = begun + self.max_policy_lag - version + 1",
        ),
        ("groups are taken in the order of urgency", "self.release(sorted(chosen))", "self.release(chosen[::-1])"),
        ("the newest groups are taken first", "(self._open[ordinal].version, ordinal)", "-ordinal"),
        ("the pipeline is deeper than the lag", "(min(max_policy_lag, pipeline_depth) + 1)", "(pipeline_depth + 1)"),
        (
            "settled groups keep their room",
            '"""Ends the leases that were trained on."""\n        self._taken.clear()',
            '"""Ends the leases that were trained on."""',
        ),
    ),
    *faults(
        "rlframe/attempts/account/leases.py",
        SIMULATED,
        ("leases are numbered anew after a restart", "int(state.get(NUM_LEASES, 0))", "0"),
        (
            "the epoch is read before the prompt is dealt",
            "(prompt,) = self.prompts.next(1)\n            epoch = self.prompts.last_epoch",
            "epoch = self.prompts.last_epoch\n            (prompt,) = self.prompts.next(1)",
        ),
    ),
    *faults(
        "rlframe/attempts/account/ledger.py",
        SIMULATED,
        (
            "a rewind keeps events of the next step",
            "keep_steps(self.file, done_steps)",
            "keep_steps(self.file, done_steps + 1)",
        ),
    ),
    *faults(
        "rlframe/attempts/engines.py",
        SIMULATED,
        (
            "a lost call drops its first request",
            "self._waiting.extendleft(reversed(batch))",
            "self._waiting.extendleft(reversed(batch[1:]))",
        ),
        (
            "answers go to other requests",
            "zip(batch, completions, strict=True)",
            "zip(batch[::-1], completions, strict=True)",
        ),
    ),
    *faults(
        "rlframe/attempts/runner.py",
        RUNNER,
        ("loads are never given back", "self._loads.finish(engine, load)", "pass"),
        (
            "a loss is told after the engine is replaced",
            "for lost in self._news.lost if lost.engine != engine]",
            "for lost in self._news.lost]",
        ),
        (
            "a failure of attempts that were forgotten ends those that follow",
            "(error := task.exception()) and not is_forgotten:",
            "(error := task.exception()):",
        ),
        ("an attempt that timed out is kept", "progress.ended = DropReason.TIMED_OUT", "progress.ended = DONE"),
    ),
    *faults(
        "rlframe/attempts/turns.py",
        SIMULATED,
        (
            "a whole response is sampled again after a restart",
            "            progress.begun, progress.waits_for = 0, WaitsFor.ENVIRONMENT",
            "            import asyncio\n            await asyncio.sleep(0.5)\n            progress.begun, progress.waits_for = 0, WaitsFor.ENVIRONMENT",
        ),
    ),
    *faults(
        "rlframe/attempts/fleet.py",
        SIMULATED,
        (
            "groups under way are lost with the runner",
            "                if self._open:\n",
            "                if False:\n",
        ),
        (
            "groups that have ended begin again with the next runner",
            "self._open.pop(ended.group.id).aside",
            "self._open[ended.group.id].aside",
        ),
        (
            "groups of training count as those of an evaluation",
            "(found if ended.group.id in names else self._kept)",
            "found",
        ),
        ("groups kept during an evaluation miss the checkpoint", "*self._take_kept()]", "]"),
        ("a replaced engine stays the old one", "self._known[engine] = actor", "pass"),
    ),
    *faults(
        "rlframe/loops/sampling/buffered.py",
        SIMULATED,
        (
            "a lease is acknowledged before it is trained",
            "        self._taken = taken\n",
            "        self._taken = taken\n        self.settle(step)\n",
        ),
        (
            "the version of a lease is read late",
            "step=own, version=step - 1,",
            "step=own, version=step,",
        ),
        ("seeds depend on when a lease begins", "self.leases.take(1, step=own", "self.leases.take(1, step=step"),
        (
            "more is leased than the run trains on",
            "(self.last_step - step + 1) - len(self.buffer.open)",
            "(self.last_step - step + 1)",
        ),
        ("dropped leases have no end", "self.leases.ledger.dropped(ordinal, reason, attempts)", "pass"),
        ("a rewind leaves attempts under way", "        if self.buffer.open:\n", "        if False:\n"),
        (
            "a restored group that waits is sampled again",
            "            if progress is None:\n",
            "            if progress is None and lost:\n",
        ),
    ),
    *faults(
        "rlframe/attempts/engines.py",
        RUNNER,
        (
            "the death of an engine counts against the next one",
            "if life == self._life and self._usable:",
            "if self._usable:",
        ),
    ),
    *faults(
        "rlframe/attempts/turns.py",
        ALL_SEEDS,
        (
            "an interrupted response forgets how far it was",
            "progress.begun += len(completion.token_ids)",
            "progress.begun = len(completion.token_ids)",
        ),
    ),
    *faults(
        "rlframe/loops/sampling/buffered.py",
        ALL_SEEDS,
        (
            "left-out attempts are not in the checkpoint",
            "groups.append(replace(done.group, rollouts=[*done.group.rollouts, *chain(*done.lost.values())]))",
            "groups.append(done.group)",
        ),
    ),
    *faults(
        "rlframe/loops/sampling/buffered.py",
        ALL_SEEDS,
        (
            "engines that sleep are asked for what is carried over",
            "            self.attempts.pause()\n        self.attempts.start(tasks)",
            "            pass\n        self.attempts.start(tasks)",
        ),
    ),
    *faults(
        "rlframe/loops/sampling/buffered.py",
        OVERSAMPLED,
        (
            "groups that are thrown away stay open",
            "            for ordinal, attempts in rest.items():",
            "            for ordinal, attempts in []:",
        ),
        ("dropped groups run on", "            self.attempts.cancel()\n            rest =", "            rest ="),
        (
            "groups that end while they are interrupted are lost",
            "        self._receive(ended)\n        return {int(task.group.id)",
            "        return {int(task.group.id)",
        ),
    ),
    *faults(
        "rlframe/loops/sampling/buffered.py",
        OVERSAMPLING,
        (
            "the last step begins too many",
            "if self.buffer.rest is not OversampleRest.DROP:",
            "if not self.buffer.rest:",
        ),
        ("what is done but not taken is not counted", "            rest |= {\n", "            _ = {\n"),
    ),
    *faults(
        "rlframe/attempts/buffer.py",
        OVERSAMPLED,
        (
            "groups that are carried over may become too old",
            "        if self.rest is OversampleRest.DROP:\n            return True",
            "        if self.oversamples:\n            return True",
        ),
    ),
    *faults(
        "rlframe/attempts/fleet.py",
        OVERSAMPLED,
        (
            "a runner that takes the place of a dead one is not interrupted",
            "                if self._paused:\n",
            "                if False:\n",
        ),
        (
            "what is carried over begins anew with the next runner",
            "self._open = {name: snapshot.get(name, task) for name, task in self._open.items()}\n"
            "        return [task for task in self._open.values() if not task.aside], ended",
            "return [snapshot.get(name, task) for name, task in self._open.items() if not task.aside], ended",
        ),
        (
            "an evaluation leaves attempts with the engines",
            "            self._kept |= {ended.group.id: ended for ended in self.pause()[1]}",
            "            pass",
        ),
    ),
    *faults(
        "rlframe/attempts/admission.py",
        "tests/unit/attempts/test_admission.py",
        ("an evaluation takes all engines", "aside <= self._share * (aside + others)", "True"),
        ("an evaluation may never begin", "aside == size or ", ""),
        ("what waits for an evaluation has a limit", "return self._is_lifted or", "return"),
        ("ended attempts count on", "self._under_way[aside] -= 1", "pass"),
    ),
    *faults(
        "rlframe/attempts/fleet.py",
        SIMULATED,
        (
            "a checkpoint takes an evaluation for a lease",
            "[task for task in self._open.values() if not task.aside], ended",
            "list(self._open.values()), ended",
        ),
    ),
    *faults(
        "rlframe/loops/reporting/samples.py",
        "tests/unit/loops/reporting/test_samples.py",
        ("attempts that are not kept are marked", "kept[list(self.places)] = True", "kept[:] = True"),
        (
            "the best are the worst",
            "if choice is Keep.BEST else (advantages, rewards)",
            "if False else (advantages, rewards)",
        ),
    ),
    *faults(
        "rlframe/loops/report/times.py",
        "tests/unit/loops/reporting/test_timeline.py",
        ("the loop's wait counts as an engine's work", 'each | {"role": DRIVER} if', "each if"),
    ),
    *faults(
        "rlframe/loops/reporting/warned.py",
        "tests/unit/loops/reporting/test_warned.py",
        ("warnings of an earlier program come again", 'if line["time_s"] >= self._began:', "if True:"),
    ),
    *faults(
        "rlframe/loops/evaluation/evaluate.py",
        "tests/unit/loops/evaluation/test_evaluate.py",
        (
            "any weights evaluate",
            "if (others := rollout.versions[rollout.loss_mask & (rollout.versions != self.step)]).size:",
            "if False:",
        ),
        ("a written evaluation is done again", "and not is_done(step := int(", "and (step := int("),
    ),
    *faults(
        "rlframe/loops/evaluation/evaluate.py",
        SIMULATED,
        (
            "an evaluation is not in the checkpoint",
            "        if self.step is not None:\n            write_sealed(",
            "        if False:\n            write_sealed(",
        ),
    ),
    *faults(
        "rlframe/attempts/engines.py",
        RUNNER,
        ("requests of attempts that are over run on", "self._unwanted.add(request.name)", "pass"),
        (
            "an abort that came too early is not repeated",
            "asyncio.get_running_loop().call_later(ABORT_AGAIN_S, self._abort_unwanted)",
            "pass",
        ),
        (
            "what has ended is aborted again and again",
            "            self._unwanted -= names",
            "            pass",
        ),
    ),
    *faults(
        "rlframe/attempts/runner.py",
        RUNNER,
        ("interrupted attempts run out of time", "limit.reschedule(None)", "pass"),
        ("attempts that were interrupted have no limit", "self._limits[attempt].reschedule(", "("),
    ),
    *faults(
        "rlframe/loops/evaluation/generate.py",
        "tests/unit/loops/evaluation/test_generate.py",
        ("what is finished is sampled again", "if name not in done]", "]"),
    ),
    *faults(
        "rlframe/utils/files/jsonl.py",
        "tests/unit/loops/evaluation/test_generate.py",
        ("a half-written line stays", "        os.truncate(file, whole_bytes)", "        pass"),
    ),
    *faults(
        "rlframe/ops/statistics/pass_at_k.py",
        "tests/unit/ops/statistics/test_pass_at_k.py",
        (
            "pass@k is biased",
            "1.0 - math.comb(num_attempts - num_solved, k) / math.comb(num_attempts, k)",
            "1.0 - (1.0 - num_solved / num_attempts) ** k",
        ),
    ),
    *faults(
        "rlframe/loops/evaluation/sets.py",
        "tests/unit/loops/evaluation/test_sets.py",
        (
            "attempts that were lost count as unsolved",
            "if len(own) >= k:\n                yield pass_at_k",
            "if True:\n                yield pass_at_k",
        ),
        ("all attempts vote", "elected(said[:k])", "elected(said)"),
        (
            "unscored attempts have a reward",
            "if not math.isnan(reward := reward_of(sequences))",
            "if (reward := reward_of(sequences)) or True",
        ),
    ),
]
