"""Dynamic sampling: what is kept, dropped and counted, and where the cursor stands."""

import asyncio
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig, Flat, flat
from rlframe.attempts.account.leases import Leases
from rlframe.attempts.account.ledger import Dropped, Ledger, read_ledger
from rlframe.attempts.buffer import Buffer
from rlframe.attempts.sessions.calls import SessionFailed, Trouble
from rlframe.data.cursor import Cursor
from rlframe.loops.sampling.buffered import BufferedSampler
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, members
from rlframe.utils.errors import RlframeError
from tests.local_attempts import LocalAttempts, answering

PROMPTS = [Prompt(id=f"p{index}", text="", input=ModelInput((index,))) for index in range(12)]
Rewards = dict[str, tuple[float, float]]


def sampler(
    rewards: Rewards,
    *,
    otherwise: tuple[float, float] = (0.0, 1.0),
    dynamic: DynamicSamplingConfig | None = None,
    num_minibatches: int = 1,
    max_policy_lag: int = 0,
) -> BufferedSampler:
    """A sampler of groups of two over four prompts a step, around a real cursor, buffer and runner; of engines that
    answer the same to everything, and a scorer that knows the rewards."""

    def nothing(request: GenerationRequest) -> Completion:
        versions = [attempts.rollout.version]
        return Completion(token_ids=[9], logprobs=[-1.0], versions=versions, finish_reason=FinishReason.STOP)

    def score(rollout: Rollout) -> None:
        rollout.reward = rewards.get(rollout.prompt.id, otherwise)[rollout.sample_index]
        rollout.reward_parts = {"right": float(rollout.reward > 0)}

    attempts = LocalAttempts([answering(nothing)], score)
    folder = Path(tempfile.mkdtemp())
    ids, tokens = [prompt.id for prompt in PROMPTS], [prompt.input.token_ids for prompt in PROMPTS]
    return BufferedSampler(
        leases=Leases(Cursor(PROMPTS, ids=ids, tokens=tokens, seed=0, shuffle=False), Ledger(folder)),
        attempts=attempts,
        scorer=None,
        phase=lambda name, on=None: nullcontext(),  # type: ignore[arg-type]
        prompts_per_step=4,
        group_size=2,
        buffer=Buffer(prompts_per_step=4, max_policy_lag=max_policy_lag, pipeline_depth=1),
        last_step=100,
        dynamic=dynamic,
        num_minibatches=num_minibatches,
    )


def dynamic(
    rewards: Rewards, *, num_minibatches: int = 1, otherwise: tuple[float, float] = (0.0, 1.0), **settings: Any
) -> BufferedSampler:
    """A dynamic sampler of groups of two over four prompts a step."""
    config = DynamicSamplingConfig(**settings)
    return sampler(rewards, otherwise=otherwise, dynamic=config, num_minibatches=num_minibatches)


def collected(sampler: BufferedSampler, step: int) -> list[str]:
    """The prompts of the rollouts of a step, in order, which is then trained on."""
    sampler.attempts.rollout.version = step - 1
    found = ids(sampler.collect(step))
    sampler.settle(step)
    return found


def ids(groups: list[Group]) -> list[str]:
    """The prompts of the rollouts, in order."""
    return [rollout.prompt.id for rollout in members(groups)]


def test_groups_without_a_signal_are_replaced_and_counted_by_reason() -> None:
    made = dynamic({"p0": (1, 1), "p2": (0, 0), "p3": (0.5, 0.5), "p5": (-1, -1), "p6": (2, 2)})
    assert collected(made, 3) == ["p1", "p1", "p4", "p4", "p7", "p7", "p8", "p8"]
    # Three are missing after the first round, two after the second: p7 and p8 fill the batch, nothing is left over.
    assert made.attempts.asked == [  # type: ignore[attr-defined]
        (["p0", "p1", "p2", "p3"], {(3, 0)}),
        (["p4", "p5", "p6"], {(3, 1)}),
        (["p7", "p8"], {(3, 2)}),
    ]
    assert made.metrics() == {
        "rollout/rounds": 3.0,
        "rollout/sampled": 18.0,
        # p1, p4, p7, p8: 1 each; 2, 0, 1, -2 and 4 for the others, over 18.
        "reward/sampled_mean": 9 / 18,
        "rollout/dropped_all_right_groups": 2.0,
        "rollout/dropped_all_wrong_groups": 2.0,
        "rollout/dropped_other_groups": 1.0,
        "rollout/dropped_unscored_groups": 0.0,
        "rollout/dropped_left_over_groups": 0.0,
        # Of five groups of two attempts, each a prompt and a response of one token.
        "rollout/dropped_tokens": 10.0,
    }
    assert made.untrained == [(2, 1)] * 10
    # What was dropped is consumed.
    assert collected(made, 4)[::2] == ["p9", "p10", "p11", "p1"]


def test_a_run_resumed_between_steps_samples_what_it_would_have() -> None:
    rewards: Rewards = {"p0": (1, 1), "p5": (0, 0), "p9": (1, 1)}
    whole, first, second = (dynamic(rewards) for _ in range(3))
    expected = [collected(whole, step) for step in (1, 2, 3)]
    found = [collected(first, 1)]
    second.leases.restore(first.leases.state())
    found += [collected(second, step) for step in (2, 3)]
    assert found == expected and whole.leases.state() == second.leases.state()


def test_a_batch_that_does_not_get_full_is_cut_to_whole_minibatches() -> None:
    made = dynamic({"p1": (0, 1), "p4": (1, 0), "p5": (0, 1)}, num_minibatches=2, otherwise=(1, 1), max_rounds=2)
    # p0 to p3, then p4 to p6: three with a signal, one too many for minibatches of equal size.
    assert collected(made, 1) == ["p1", "p1", "p4", "p4"]
    assert made.metrics()["rollout/dropped_left_over_groups"] == 1.0
    assert made.metrics()["rollout/dropped_all_right_groups"] == 4.0


def test_a_group_that_is_left_over_is_accounted_for_with_its_failed_attempts() -> None:
    def observe(rollout: Rollout) -> None:
        if rollout.sample_index == 2:
            raise RuntimeError("no session left")

    def score(rollout: Rollout) -> None:
        rollout.reward = float(rollout.sample_index * (rollout.prompt.id != "p3"))

    def says(_: GenerationRequest) -> Completion:
        return Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)

    made = dynamic({}, num_minibatches=2, max_rounds=1)
    made.group_size = 3
    made.attempts = LocalAttempts([answering(says)], score, observe=observe)  # type: ignore[assignment]
    assert collected(made, 1) == ["p0", "p0", "p1", "p1"]
    dropped = [each for each in read_ledger(made.leases.ledger.file.parent).events if isinstance(each, Dropped)]
    assert [(each.reason, each.lengths) for each in dropped] == [
        ("flat_all_wrong", [1, 1, 1]),
        ("left_over", [1, 1, 1]),
    ]


def test_a_group_that_is_left_over_for_want_of_successful_ones_is_counted_without_dynamic_sampling() -> None:
    left = ["p1", "p2", "p4"] * 2

    def observe(rollout: Rollout) -> None:
        # In the first epoch alone, with both attempts of the group.
        if rollout.prompt.id not in left:
            raise RuntimeError("no session left")
        left.remove(rollout.prompt.id)

    def says(_: GenerationRequest) -> Completion:
        return Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)

    made = sampler({}, num_minibatches=2)
    made.attempts = LocalAttempts([answering(says)], lambda rollout: None, observe=observe)  # type: ignore[assignment]
    assert collected(made, 1) == ["p1", "p1", "p2", "p2"]
    assert made.metrics()["rollout/dropped_left_over_groups"] == 1.0


def test_a_batch_without_any_signal_ends_the_run_with_the_counts() -> None:
    made = dynamic({"p0": (1, 1)}, otherwise=(0, 0), max_rounds=2)
    counts = "groups with equal rewards: 1 all right, 7 all wrong, 0 other"
    message = rf"step 7: fewer than the 1 groups .* in 2 rounds .* {counts}"
    with pytest.raises(RlframeError, match=message):
        made.collect(step=7)


def one_by_one(rewards: Rewards, *, otherwise: tuple[float, float] = (0.0, 1.0), **settings: Any) -> BufferedSampler:
    """A dynamic sampler with a lag of 1, whose groups end one after the other."""
    made = sampler(rewards, otherwise=otherwise, dynamic=DynamicSamplingConfig(**settings), max_policy_lag=1)
    score = made.attempts._score  # type: ignore[attr-defined]

    def nothing(request: GenerationRequest) -> Completion:
        versions = [made.attempts.rollout.version]
        return Completion(token_ids=[9], logprobs=[-1.0], versions=versions, finish_reason=FinishReason.STOP)

    async def observe(rollout: Rollout) -> None:
        await asyncio.sleep(1 + int(rollout.prompt.id[1:]))

    made.attempts = LocalAttempts([answering(nothing)], score, observe=observe)
    return made


def test_groups_that_are_replaced_one_by_one_are_rounds_by_their_number() -> None:
    made = one_by_one(dict.fromkeys([f"p{index}" for index in range(8)], (1.0, 1.0)))
    assert collected(made, 1)[::2] == ["p8", "p9", "p10", "p11"]
    # As many prompts as six rounds of four begin, not a round for each time that some were begun.
    metrics, leased = made.metrics(), made.leases.num_taken
    assert 20 < leased <= 24 and metrics["rollout/rounds"] == 6.0
    assert len(made.attempts.asked) > 10  # type: ignore[attr-defined]
    made.reset()


def test_the_rounds_of_a_batch_without_any_signal_are_those_that_were_allowed() -> None:
    made = one_by_one({}, otherwise=(0, 0), max_rounds=3)
    with pytest.raises(RlframeError, match="had different rewards, in 3 rounds"):
        made.collect(1)
    made.reset()


def test_the_signal_may_be_that_of_one_reward() -> None:
    # The sums differ, by a penalty of length, but both answers are right.
    made = dynamic({"p1": (1.0, 0.5)}, reward_part="right")
    assert "p1" not in collected(made, 1)
    assert made.metrics()["rollout/dropped_all_right_groups"] == 1.0


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((1, 1), Flat.ALL_RIGHT),
        ((0, 0), Flat.ALL_WRONG),
        ((-1, -1), Flat.ALL_WRONG),
        ((0.3, 0.3), Flat.OTHER),
        ((0, 1), None),
    ],
)
def test_why_a_group_is_flat(rewards: tuple[float, float], reason: Flat | None) -> None:
    made = sampler({"p0": rewards})
    (group,) = made.attempts.generate(PROMPTS[:1], group_size=2, step=1)
    assert flat(group.rollouts, None) == reason


def test_the_plain_sampler_keeps_every_group() -> None:
    plain = sampler({"p0": (1, 1)})
    assert collected(plain, 1) == ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"]
    assert plain.metrics() == {}


def test_a_step_without_a_round_is_refused() -> None:
    with pytest.raises(ValueError, match="max_rounds must be at least 1, got 0"):
        DynamicSamplingConfig(max_rounds=0)


@pytest.mark.parametrize("lag", [0, 1])
def test_engines_prove_their_weights_after_sampling_whatever_the_lag(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, audits = sampler({}), []
    made.buffer = Buffer(prompts_per_step=4, max_policy_lag=lag, pipeline_depth=1)
    monkeypatch.setattr(made.attempts, "audit", lambda: audits.append(lag))
    collected(made, 1)
    assert audits == [lag]


def test_a_step_whose_attempts_all_fail_says_what_to_mend() -> None:
    made = sampler({})

    def observe(rollout: Rollout) -> None:
        raise RuntimeError("no session left")

    made.attempts = LocalAttempts(  # type: ignore[assignment]
        [
            answering(
                lambda _: Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)
            )
        ],
        lambda rollout: None,
        observe=observe,
    )
    # Four prompts, two attempts each: eight rounds make the first 64.
    with pytest.raises(RlframeError, match="each of the first 64 attempts has failed.*no session left"):
        made.collect(1)


def test_what_happens_to_attempts_until_a_checkpoint_counts_in_the_next_step_of_a_resumed_run_too(
    tmp_path: Path,
) -> None:
    def observe(rollout: Rollout) -> None:
        if rollout.prompt.id == "p8":
            raise SessionFailed(Trouble.RAISED, "no session left")

    def score(rollout: Rollout) -> None:
        rollout.reward = float(rollout.sample_index * (rollout.prompt.id not in ("p4", "p5", "p6", "p7")))

    def says(_: GenerationRequest) -> Completion:
        return Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)

    first, second = (sampler({}, dynamic=DynamicSamplingConfig(), max_policy_lag=1) for _ in range(2))
    first.attempts = LocalAttempts([answering(says)], score, observe=observe)  # type: ignore[assignment]
    first.collect(1)
    first.settle(1)
    assert first.attempts.events == {}
    # The policy trains meanwhile, and p8, in the place of p4, ends.
    first.attempts._loop.run_until_complete(asyncio.sleep(1))  # type: ignore[attr-defined]
    first.hold(1)(tmp_path)
    second.go_on(tmp_path)
    assert second.attempts.events == first.attempts.events == {"raised": 2}
    for each in (first, second):
        each.reset()


def test_what_happens_to_attempts_of_a_step_that_is_done_again_counts_once() -> None:
    def observe(rollout: Rollout) -> None:
        if rollout.prompt.id == "p1":
            raise SessionFailed(Trouble.RAISED, "no session left")

    def says(_: GenerationRequest) -> Completion:
        return Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)

    made = sampler({})
    made.attempts = LocalAttempts([answering(says)], lambda rollout: None, observe=observe)  # type: ignore[assignment]
    beginning = made.leases.state()
    made.collect(1)
    # A rank of the trainer dies, before the step has a line of metrics.
    made.reset()
    made.leases.restore(beginning)
    made.collect(1)
    assert made.attempts.events == {"raised": 2}


def test_what_happens_to_attempts_that_are_forgotten_is_not_counted() -> None:
    async def observe(rollout: Rollout) -> None:
        await asyncio.sleep(int(rollout.prompt.id[1:]))
        if rollout.prompt.id == "p6":
            raise SessionFailed(Trouble.RAISED, "no session left")

    def says(_: GenerationRequest) -> Completion:
        return Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)

    made = sampler({}, max_policy_lag=1)
    made.attempts = LocalAttempts([answering(says)], lambda rollout: None, observe=observe)  # type: ignore[assignment]
    beginning = made.leases.state()
    made.collect(1)
    # p6 fails while the policy trains, and then a rank of the trainer dies.
    made.attempts._loop.run_until_complete(asyncio.sleep(10))  # type: ignore[attr-defined]
    made.reset()
    made.leases.restore(beginning)
    made.collect(1)
    assert made.attempts.events == {}
    made.reset()


def test_what_a_checkpoint_judges_counts_in_the_next_step_and_before_its_position_is_read(tmp_path: Path) -> None:
    flat_ones = dict.fromkeys(("p4", "p5", "p6", "p7", "p8", "p9"), (1.0, 1.0))
    made = sampler(flat_ones, dynamic=DynamicSamplingConfig(), max_policy_lag=1)
    measured: list[str] = []

    class Noted:
        """A curriculum that notes what is measured."""

        def reach(self, step: int) -> None: ...

        def passes_over(self, prompt: Prompt) -> bool:
            return False

        def measure(self, prompt: Prompt, rollouts: list[Rollout]) -> None:
            measured.append(prompt.id)

        def metrics(self, step: int) -> dict[str, float]:
            return {}

    made.leases.curriculum = Noted()
    made.attempts.rollout.version = 0
    made.collect(1)
    made.settle(1)
    collected = len(measured)
    # The policy trains meanwhile.
    made.attempts._loop.run_until_complete(asyncio.sleep(1))
    write = made.hold(1)
    held = measured[collected:]
    # In step 1 the first four were taken and the next four dropped.
    assert held == ["p8", "p9", "p10", "p11"]
    write(tmp_path)
    assert measured[collected:] == held
    flat_ones.clear()
    made.attempts.rollout.version = 1
    made.collect(2)
    assert made.metrics()["rollout/dropped_all_right_groups"] == 2
    assert made.metrics()["rollout/dropped_tokens"] == 4
    made.reset()


def test_a_step_that_judges_nothing_has_no_mean_reward_of_what_it_sampled() -> None:
    made = sampler({}, dynamic=DynamicSamplingConfig(), max_policy_lag=1)
    collected(made, 1)
    assert made.metrics()["reward/sampled_mean"] == 0.5
    # Its groups were judged in the step before.
    collected(made, 2)
    assert made.metrics()["rollout/sampled"] == 0 and "reward/sampled_mean" not in made.metrics()
    made.reset()


def test_what_a_checkpoint_judges_counts_in_the_next_step_of_a_resumed_run_too(tmp_path: Path) -> None:
    flat_ones = dict.fromkeys(("p4", "p5", "p6", "p7", "p8", "p9"), (1.0, 1.0))
    first, second = (sampler(flat_ones, dynamic=DynamicSamplingConfig(), max_policy_lag=1) for _ in range(2))
    first.attempts.rollout.version = 0
    first.collect(1)
    first.settle(1)
    # The policy trains meanwhile.
    first.attempts._loop.run_until_complete(asyncio.sleep(1))
    first.hold(1)(tmp_path)
    position = first.leases.state()
    flat_ones.clear()
    first.attempts.rollout.version = 1
    first.collect(2)
    second.leases.restore(position)
    second.attempts.rollout.version = 1
    second.go_on(tmp_path)
    second.collect(2)
    names = ("rollout/sampled", "reward/sampled_mean", "rollout/dropped_all_right_groups", "rollout/dropped_tokens")
    expected, found = first.metrics(), second.metrics()
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
    assert list(map(tuple, second.untrained)) == first.untrained != []
    for each in (first, second):
        each.reset()


def test_a_resumed_run_keeps_the_newest_pass_rate_of_a_prompt_that_is_also_in_a_group_that_waits(
    tmp_path: Path,
) -> None:
    rates: dict[str, float] = {}
    times: dict[str, int] = dict.fromkeys(("p0", "p1", "p2", "p3"), 0)

    class Rated:
        """A curriculum with the newest pass rate of each prompt."""

        def reach(self, step: int) -> None: ...

        def passes_over(self, prompt: Prompt) -> bool:
            return False

        def measure(self, prompt: Prompt, rollouts: list[Rollout]) -> None:
            rates[prompt.id] = sum(rollout.reward for rollout in rollouts) / 2

        def metrics(self, step: int) -> dict[str, float]:
            return {}

    def score(rollout: Rollout) -> None:
        lease, times[rollout.prompt.id] = times[rollout.prompt.id] // 2, times[rollout.prompt.id] + 1
        is_right = (rollout.prompt.id, lease) in (("p1", 1), ("p0", 2))
        rollout.reward = 1.0 if is_right else float(rollout.sample_index)

    def says(_: GenerationRequest) -> Completion:
        return Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)

    first, second = (sampler({}, dynamic=DynamicSamplingConfig(), max_policy_lag=1) for _ in range(2))
    few = PROMPTS[:4]
    ids, tokens = [prompt.id for prompt in few], [prompt.input.token_ids for prompt in few]
    for number, each in enumerate((first, second)):
        cursor = Cursor(few, ids=ids, tokens=tokens, seed=0, shuffle=False)
        each.leases = Leases(cursor, Ledger(tmp_path / str(number)), curriculum=Rated())  # type: ignore[arg-type]
        each.attempts = LocalAttempts([answering(says)], score)  # type: ignore[assignment]
        each.attempts.rollout.version = 0
    (tmp_path / "0").mkdir()
    first.collect(1)
    first.settle(1)
    first.attempts._loop.run_until_complete(asyncio.sleep(1))  # type: ignore[attr-defined]
    first.hold(1)(tmp_path)
    # The group of its second epoch waits, that of its third was dropped.
    assert "p0" in [each.lease.prompt.id for each in first.buffer.waiting] and rates["p0"] == 1.0
    second.leases.restore(first.leases.state())
    second.go_on(tmp_path)
    assert rates["p0"] == 1.0
    for each in (first, second):
        each.reset()


@pytest.mark.parametrize("lag", [0, 1])
def test_groups_that_are_replaced_do_not_hasten_the_curriculum(lag: int) -> None:
    """The first eight groups are dropped, so that twice as many prompts are leased as are trained on."""
    made = sampler(dict.fromkeys([f"p{index}" for index in range(8)], (1.0, 1.0)), max_policy_lag=lag)
    made.dynamic = DynamicSamplingConfig()
    reached: list[int] = []

    class Noted:
        """A curriculum that notes the steps for which prompts are taken."""

        def reach(self, step: int) -> None:
            reached.append(step)

        def passes_over(self, prompt: Prompt) -> bool:
            return False

        def measure(self, prompt: Prompt, rollouts: list[Rollout]) -> None: ...

        def metrics(self, step: int) -> dict[str, float]:
            return {}

    made.leases.curriculum = Noted()
    made.attempts.rollout.version = 0
    assert len(made.collect(1)) == 4
    assert set(reached) == {1, 1 + lag}
    made.reset()
