"""Faults in the ledger and its audit, in stored groups and in recordings."""

from tests.mutations.mutation import Mutation, faults

AUDIT = "tests/unit/tools/test_audit.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/attempts/account/fields.py",
        "tests/unit/attempts/account/test_stored.py",
        ("a tuple comes back as a list", '"tuple": tuple}', '"tuple": list}'),
    ),
    *faults(
        "rlframe/attempts/account/stored.py",
        "tests/unit/attempts/account/test_stored.py",
        ("arrays of another folder are taken", "if hashlib.sha256(content).hexdigest() != digest:", "if False:"),
        (
            "rewards of tokens are dropped",
            'arrays.take("token_rewards", length) if arrays.of("has_token_rewards") else None',
            "None",
        ),
        (
            "weights come back as parts",
            "dict(zip(weights, scores[len(parts) :], strict=True))",
            "dict(zip(weights, scores, strict=False))",
        ),
    ),
    *faults(
        "rlframe/attempts/account/ledger.py",
        "tests/unit/attempts/account/test_ledger.py",
        ("lag is counted from the next version", "version=step - 1,", "version=step,"),
        ("given responses lag", "return versions[versions >= 0]", "return versions"),
        ("events of a dead step are written later", "self._waiting.clear()", ""),
        ("events are written twice", "events, self._waiting = self._waiting, []", "events = self._waiting"),
        ("an ended lease stays open", "found.pop(event.lease, None)", "pass"),
        ("the oldest is the newest", "oldest=step - 1 - int(lags.max())", "oldest=step - 1 - int(lags.min())"),
    ),
    *faults(
        "rlframe/tools/audit.py",
        AUDIT,
        ("a lease may end twice", "if len(life.ends) > 1:", "if len(life.ends) > 2:"),
        (
            "a prompt may be leased twice",
            "if counts[event.prompt, event.epoch] > 1:",
            "if counts[event.prompt, event.epoch] > 2:",
        ),
        (
            "a prompt may be skipped",
            "if epoch > 0 and (prompt, epoch - 1) not in leased:",
            "if epoch > 1 and (prompt, epoch - 1) not in leased:",
        ),
        (
            "a token may be one too old",
            "if event.version - event.oldest > run.max_policy_lag:",
            "if event.version - event.oldest > run.max_policy_lag + 1:",
        ),
        ("a lease may be forgotten for a step", "if done > (last :=", "if done > 1 + (last :="),
        ("a small step needs no reason", "explained = unknown or (step in dropped and count > 0)", "explained = True"),
        ("lost attempts are not missed", "count < run.group_size:", "count < 1:"),
        (
            "a group may be carried over when it has ended",
            "end.step + isinstance(end, Dropped) <= step",
            "end.step + 1 <= step",
        ),
        ("any number may be thrown away", "or len(leases) > excess:", "or False:"),
        ("faults leave the status 0", "return 1 if wrong else 0", "return 0"),
    ),
    *faults(
        "rlframe/loops/sampling/recorded.py",
        "tests/unit/loops/sampling/test_recorded.py",
        ("another run's recording is gone on with", "if state != self.state():", "if False:"),
        ("recordings of steps that are done again stay", "forget_after(self.output, step)", "pass"),
        (
            "the first step is recorded only",
            "step_folder(self.output, step), groups)",
            "step_folder(self.output, 1), groups)",
        ),
    ),
    *faults(
        "rlframe/run/check/replay.py",
        "tests/unit/run/check/test_check_replay.py",
        ("any tokenizer will do", "if recording.tokenizer != mine.tokenizer:", "if False:"),
        ("steps may be missing", "if not missing:", "if missing:"),
    ),
]
