"""Credit by turn: advantages worked by hand, for unequal numbers of turns, forks, masks; and what stays GRPO's."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.algorithms.credit import Credit, CreditConfig, Peers
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.on_policy_distillation import OnPolicyDistillationConfig
from rlframe.ops.advantages import NormalizeBy
from rlframe.ops.kl import KlEstimator
from rlframe.ops.packing import pack
from rlframe.ops.turns import turns_of
from rlframe.types.batch import Batch
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, Group, Rollout
from rlframe.types.turn import TurnRecord, state_of_name
from rlframe.utils.errors import SettingError

PROMPT = Prompt(id="0", text="?", input=ModelInput(np.array([3])))


def attempt(index: int, *turns: tuple[str, float], reward: float = 0.0, length: int = 2, before: int = 0) -> Rollout:
    """An attempt of turns of (state, reward of the turn), of `length` tokens each, with an observed token between."""
    made = Rollout.begin(PROMPT, index)
    made.first_turn = before
    made.records = [TurnRecord(finish_reason="stop")] * before
    for place, (state, credit) in enumerate(turns):
        if place:
            made.observe([9])
        made.append(
            Completion(
                token_ids=np.full(length, 5),
                logprobs=np.full(length, -1.0),
                versions=np.zeros(length),
                finish_reason=FinishReason.STOP,
            )
        )
        made.records = [*made.records, TurnRecord(finish_reason="stop", state=state_of_name(state))]
        if credit:
            made.credit(credit)
    made.reward = reward
    return made


def group(*rollouts: Rollout, id: str = "g") -> Group:
    return Group(id=id, prompt=PROMPT, rollouts=list(rollouts))


def advantages(batch: Batch, credit: CreditConfig, by: NormalizeBy = NormalizeBy.NONE) -> list[list[float]]:
    """The advantage of each turn of each sequence, which all of its tokens share."""
    values = Grpo(GrpoConfig(normalize_by=by, credit=credit)).train_batch(batch).advantages
    found: list[list[float]] = []
    lengths = batch.lengths.tolist()
    for own, mask in zip(values.split(lengths), batch.loss_mask.split(lengths), strict=True):
        assert not own[~mask].any()
        pairs = zip(mask.tolist(), own.tolist(), strict=True)
        runs = [[value for _, value in run] for inside, run in itertools.groupby(pairs, lambda pair: pair[0]) if inside]
        assert all(len(set(run)) == 1 for run in runs)
        found.append([round(run[0], 4) for run in runs])
    return found


TURN = CreditConfig(by=Credit.TURN, discount=0.5)
ALL_TURNS = CreditConfig(by=Credit.TURN, discount=0.5, peers=Peers.ALL_TURNS)
STATE = CreditConfig(by=Credit.STATE, discount=0.5, weight=0.5)


def maze() -> list[Rollout]:
    """Three attempts from state s. The first goes s, u, v and gets 2 for u and 8 in the end; the second s, v, with 1
    for s and 4 in the end; the third s, u, u, s for nothing.

    With discount 0.5 they earn from each turn on: 0 + 0.5 * (2 + 0.5 * 8) = 3, 2 + 0.5 * 8 = 6, 8; 1 + 0.5 * 4 = 3, 4;
    0, 0, 0, 0.
    """
    return [
        attempt(0, ("s", 0.0), ("u", 2.0), ("v", 0.0), reward=8.0),
        attempt(1, ("s", 1.0), ("v", 0.0), reward=4.0, length=3),
        attempt(2, ("s", 0.0), ("u", 0.0), ("u", 0.0), ("s", 0.0), length=1),
    ]


# Turn 0: 3, 3, 0, mean 2. Turn 1: 6, 4, 0, mean 10/3. Turn 2: 8, 0, mean 4. Turn 3: 0 alone.
OF_TURNS = [[1.0, 2.6667, 4.0], [1.0, 0.6667], [-2.0, -3.3333, -4.0, 0.0]]
# Attempts: 10, 5, 0, mean 5. In s: 3, 3, 0, 0, mean 1.5. In u: 6, 0, 0, mean 2. In v: 8, 4, mean 6.
# 5 + 0.5 * 1.5, 5 + 0.5 * 4, 5 + 0.5 * 2; 0 + 0.75, 0 - 1; -5 - 0.75, -5 - 1, -5 - 1, -5 - 0.75.
OF_STATES = [[5.75, 7.0, 6.0], [0.75, -1.0], [-5.75, -6.0, -6.0, -5.75]]


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        (TURN, OF_TURNS),
        # 3, 6, 8, 3, 4, 0, 0, 0, 0: mean 24 / 9.
        (ALL_TURNS, [[0.3333, 3.3333, 5.3333], [0.3333, 1.3333], [-2.6667] * 4]),
        (STATE, OF_STATES),
        # The whole outcome at each turn that it followed, compared with that of the others: 8 + 2, 8 + 2, 8; 5, 4.
        (CreditConfig(by=Credit.TURN), [[5.0, 5.3333, 4.0], [0.0, -0.6667], [-5.0, -4.6667, -4.0, 0.0]]),
        (CreditConfig(), [[5.0] * 3, [0.0] * 2, [-5.0] * 4]),
        # Each turn its own reward only: 0, 2, 8; 1, 4; 0.
        (CreditConfig(by=Credit.TURN, discount=0.0), [[-0.3333, 0.0, 4.0], [0.6667, 2.0], [-0.3333, -2.0, -4.0, 0.0]]),
    ],
)
def test_advantages_of_turns_worked_by_hand(credit: CreditConfig, expected: list[list[float]]) -> None:
    assert advantages(pack([group(*maze())]), credit) == expected


@pytest.mark.parametrize(
    ("credit", "by", "expected"),
    [
        # s: sqrt(4 * 2.25 / 3) = 1.7320508; u: sqrt((16 + 4 + 4) / 2) = 3.4641016; v: sqrt(8 / 1) = 2.8284271.
        # Attempts: 5.
        (
            CreditConfig(by=Credit.STATE, discount=0.5),
            NormalizeBy.GROUP_STD,
            [[1.8660, 2.1547, 1.7071], [0.8660, -0.7071], [-1.8660, -1.5774, -1.5774, -1.8660]],
        ),
        # The nine differ from 24 / 9 by squares whose sum is 70: sqrt(70 / 8) = 2.9580399.
        (ALL_TURNS, NormalizeBy.GROUP_STD, [[0.1127, 1.1269, 1.8030], [0.1127, 0.4507], [-0.9015] * 4]),
        (TURN, NormalizeBy.BATCH_STD, [[0.3381, 0.9015, 1.3522], [0.3381, 0.2254], [-0.6761, -1.1269, -1.3522, 0.0]]),
    ],
)
def test_turns_are_divided_by_the_deviation_of_those_they_are_compared_with(
    credit: CreditConfig, by: NormalizeBy, expected: list[list[float]]
) -> None:
    assert advantages(pack([group(*maze())]), credit, by) == [pytest.approx(row, abs=1.1e-4) for row in expected]


@pytest.mark.parametrize(("credit", "expected"), [(TURN, OF_TURNS), (STATE, OF_STATES)])
def test_an_attempt_in_several_sequences_has_the_same_turns(credit: CreditConfig, expected: list[list[float]]) -> None:
    _, second, third = maze()
    early = attempt(0, ("s", 0.0), ("u", 2.0), reward=8.0)
    late = attempt(0, ("v", 0.0), reward=8.0, before=2)
    late.sequence = 1
    (first_turns, *others) = expected
    split = [first_turns[:2], first_turns[2:], *others]
    assert advantages(pack([group(early, late, second, third)]), credit) == split
    # In whatever order, and beside another group of the same states.
    batch = pack([group(early, late, second, third), group(*maze(), id="other")])
    order = [4, 1, 6, 3, 0, 5, 2]
    assert advantages(batch.select(order), credit) == [[*split, *expected][index] for index in order]


@pytest.mark.parametrize(
    ("credit", "expected"), [(TURN, OF_TURNS), (STATE, OF_STATES), (CreditConfig(), [[5.0] * 3, [0.0] * 2, [-5.0] * 4])]
)
def test_turns_that_are_not_trained_on_still_count_for_the_others(
    credit: CreditConfig, expected: list[list[float]]
) -> None:
    rollouts = maze()
    rollouts[1].finish_reason = FinishReason.LENGTH
    assert advantages(pack([group(*rollouts)], mask_truncated=True), credit) == [expected[0], [], expected[2]]


def test_attempts_without_a_reward_are_nobodys_peers() -> None:
    rollouts = [*maze(), attempt(3, ("s", 5.0), ("u", 5.0), reward=float("nan"))]
    assert advantages(pack([group(*rollouts)]), TURN) == [*OF_TURNS, [0.0, 0.0]]


def test_the_kl_in_the_reward_is_taken_off_the_turn_it_belongs_to() -> None:
    batch = pack([group(*maze())])
    # A KL of 1 at both tokens of the first attempt's turn 1, times 0.25.
    reference = batch.rollout_logprobs.clone()
    reference[4:6] -= 1.0
    assert turns_of(batch).of_token[4:6].tolist() == [1, 1]
    batch.reference_logprobs = reference
    config = GrpoConfig(
        normalize_by=NormalizeBy.NONE, credit=TURN, kl_coefficient=0.25, kl_in_reward=True, kl_estimator=KlEstimator.K1
    )
    values = Grpo(config).train_batch(batch).advantages
    # It earns 2 + 4 - 0.5 = 5.5 from turn 1 on, and 2.75 from turn 0 on: means 9.5 / 3 and 5.75 / 3.
    assert values[[1, 4, 7]].tolist() == pytest.approx([2.75 - 5.75 / 3, 5.5 - 9.5 / 3, 4.0], abs=1e-5)


def test_states_without_a_record_are_the_same_after_the_same_tokens() -> None:
    rollouts = [attempt(index, ("", 0.0), ("", 0.0)) for index in range(3)]
    rollouts[2].input.token_ids[2] = 6
    for rollout in rollouts:
        rollout.records = ()
    batch = pack([group(*rollouts)])
    assert batch.states is not None
    states = batch.states.view(3, -1)
    assert states[0].tolist() == states[1].tolist() and states[2][1] == states[0][1] != states[0][4] != states[2][4]


def test_batches_of_single_turns_carry_nothing_for_it() -> None:
    single = pack([group(attempt(0, ("s", 0.0)), attempt(1, ("s", 1.0)))])
    assert single.turns is single.states is None
    several = pack([group(*maze())])
    assert several.turns is not None and several.turns.tolist()[:10] == [-1, 0, 0, -1, 1, 1, -1, 2, 2, -1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by", [by for by in NormalizeBy if by is not NormalizeBy.PART_STD])
@pytest.mark.parametrize("peers", Peers)
def test_with_one_turn_in_each_attempt_nothing_changes_bit_for_bit(seed: int, by: NormalizeBy, peers: Peers) -> None:
    """By state the turn's advantage is the attempt's, so that both together are 1 + weight times it."""
    random = np.random.default_rng(seed)
    groups = [
        group(
            *(
                attempt(index, ("s", random.normal()), reward=random.normal(), length=int(random.integers(1, 5)))
                for index in range(random.integers(1, 6))
            ),
            id=str(number),
        )
        for number in range(5)
    ]
    plain = pack(groups)
    plain.reference_logprobs = plain.rollout_logprobs + torch.randn(plain.num_tokens) * plain.loss_mask
    known = plain.select(list(range(plain.num_sequences)))
    known.turns = torch.where(known.loss_mask, 0, -1).int()
    known.states = torch.where(known.loss_mask, 7, 0)
    kl: Any = {"kl_coefficient": 0.1, "kl_in_reward": True, "normalize_by": by}
    outcome = Grpo(GrpoConfig(**kl)).train_batch(plain).advantages
    assert outcome.any()
    by_turn = GrpoConfig(**kl, credit=CreditConfig(by=Credit.TURN, discount=0.3, peers=peers))
    by_state = GrpoConfig(**kl, credit=CreditConfig(by=Credit.STATE, discount=0.3, weight=0.7))
    for batch in (plain, known):
        assert torch.equal(Grpo(by_turn).train_batch(batch).advantages, outcome)
        assert torch.equal(Grpo(by_state).train_batch(batch).advantages, outcome + 0.7 * outcome)


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda: CreditConfig(discount=0.5), "discount has no effect with by=outcome"),
        (lambda: CreditConfig(by=Credit.STATE, peers=Peers.ALL_TURNS), "peers has no effect with by=state"),
        (lambda: CreditConfig(by=Credit.TURN, weight=2.0), "weight has no effect with by=turn"),
        (lambda: CreditConfig(by=Credit.TURN, discount=1.5), "discount must be at most 1"),
        (
            lambda: GrpoConfig(normalize_by=NormalizeBy.PART_STD, credit=TURN),
            "normalize_by must not be part_std with credit.by=turn",
        ),
        (lambda: OnPolicyDistillationConfig(credit=TURN), "credit has no effect with reward_coefficient=0"),
    ],
)
def test_settings_without_meaning_are_refused(build: Any, rule: str) -> None:
    with pytest.raises(SettingError, match=rule):
        build()
