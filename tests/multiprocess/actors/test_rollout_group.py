"""Engines and attempts over real Ray actors: order, seeds, turns, versions, deaths."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.fleet import Attempts
from rlframe.attempts.rendering.config import RenderingConfig
from rlframe.attempts.runner import Ended
from rlframe.attempts.turns import Task
from rlframe.attempts.worker import RunnerSetup
from rlframe.cluster.config import ClusterConfig, Device
from rlframe.cluster.placement import reserve
from rlframe.cluster.roles import Topology, policy
from rlframe.cluster.roles import engines as role_of_engines
from rlframe.cluster.runtime import running
from rlframe.data.config import DataConfig
from rlframe.environments.config import EnvironmentConfig
from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.rollout.base.config import EngineDtype
from rlframe.rollout.base.speculative import SpeculativeConfig
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.rollout.fleet.worker import RolloutSetup
from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, GenerationRequest, Group, SamplingParams, members
from rlframe.utils.errors import WeightSyncFailed, WorkerDied
from rlframe.weight_sync.border import DestinationRank
from tests.multiprocess.actors.faults import die_at, fast, hold, in_both, in_engine, slow
from tests.rollout_models import EOS, make_with_tokenizer
from tests.until import under_a_fair_limit, until

PROMPTS = [Prompt(id=f"p{index}", text="", input=ModelInput(tuple(range(5, 7 + 3 * index)))) for index in range(5)]

A_WORD = SamplingParams(max_tokens=6, stop=("w",))
"""Every word ends a response. One that is cut off would not be put to the environment."""


def said(groups: Iterable[Group]) -> list[list[list[int]]]:
    """The tokens of each rollout, by group. Logprobs may differ in their last bits between batches."""
    return [[rollout.token_ids.tolist() for rollout in group.rollouts] for group in groups]


def groups_of(size: int) -> list[Group]:
    """Attempts at each prompt of which nothing is sampled yet."""
    return [Group.begin(prompt.id, prompt, size) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutGroup]:
    """Two engines on one device, verified at version 0."""
    setup = RolloutSetup(
        rollout=TransformersConfig(num_engines=2, engines_per_device=2, max_tokens=6),
        model=ModelConfig(path=str(folder)),
        dtype=EngineDtype.FLOAT32,
        device=Device.CPU,
        seed=11,
    )
    two_engines = role_of_engines(2, engines_per_device=2, colocate=True)
    with running(ClusterConfig(), num_devices=1):
        placement = reserve(Topology((policy(1), two_engines)), gpu=False, timeout_s=60)
        engines = RolloutGroup(
            setup,
            slots=placement.engines,
            log_folder=str(tmp_path_factory.mktemp("logs")),
            num_threads=1,
            start_timeout_s=120,
            call_timeout_s=60,
        )
        engines.start()
        engines.commit(0)

        def rejoin(restarted: list[int]) -> None:
            # A weight sync plans for all engines.
            engines.call(DestinationRank.describe)
            # A new engine holds the checkpoint that all of them have loaded.
            engines.commit(0, engines=restarted)

        engines.rejoin = rejoin
        yield engines
        engines.workers.stop()
        placement.release()


def attempts_of(
    group: RolloutGroup, environment: str | EnvironmentConfig, *, max_positions: int = 1024, **settings: object
) -> Attempts:
    """Returns a runner of the engines of `group`."""
    if isinstance(environment, str):
        environment = EnvironmentConfig(name=environment, workers=1)
    setup = RunnerSetup(
        rollout=replace(group.setup.rollout, **settings),
        environment=environment,
        rendering=RenderingConfig(),
        data=DataConfig(),
        tokenizer=tokenizer.load(resolve(group.setup.model)),
        reward=None,
        seed=group.setup.seed,
        max_calls=group.max_calls,
        max_positions=max_positions,
        folder=os.getcwd(),
    )
    logs = str(Path(group.workers.log_folder))
    return Attempts(group, setup, log_folder=logs, start_timeout_s=120, call_timeout_s=60)


def ended_groups(attempts: Attempts) -> dict[str, Group]:
    """Returns one group for each prompt as they end, by id."""
    found: dict[str, Group] = {}
    with attempts.waiting():
        while len(found) < len(PROMPTS):
            found |= {ended.group.id: ended.group for ended in attempts.next()}
    return found


@pytest.fixture(scope="module")
def attempts(group: RolloutGroup) -> Attempts:
    return attempts_of(group, "single_turn")


@pytest.fixture(scope="module")
def two_turns(group: RolloutGroup) -> Attempts:
    return attempts_of(group, "tests.environments:OneMoreTurn")


def test_an_agent_asks_the_engines_at_an_endpoint_of_the_loopback(group: RolloutGroup):
    options = {"function": "tests.environments:asks_three_times"}
    attempts = attempts_of(group, EnvironmentConfig(name="endpoint", options=options, workers=1))
    try:
        rollouts = members(attempts.generate(PROMPTS[:2], group_size=2, step=1, sampling=A_WORD))
        assert attempts.metrics() == {"environment/forked": 4.0, "environment/parameters_ignored": 4.0}
        again = members(attempts.generate(PROMPTS[:2], group_size=2, step=1, sampling=A_WORD))
    finally:
        attempts.close()
    assert [(each.prompt.id, each.sample_index, each.sequence) for each in rollouts] == [
        (name, index, sequence) for name in ("p0", "p1") for index in range(2) for sequence in range(2)
    ]
    assert [each.token_ids.tolist() for each in rollouts] == [each.token_ids.tolist() for each in again]
    for two_turns, one_turn in zip(rollouts[::2], rollouts[1::2], strict=True):
        first, second = two_turns.spans
        ended = [] if two_turns.token_ids[first.end - 1] == EOS else [EOS]
        assert two_turns.token_ids[first.end : second.start].tolist() == [*ended, 3, 10, EOS, 4]
        assert len(one_turn.spans) == 1 and one_turn.total_reward == 1.0 and two_turns.total_reward == 0.0
        # Another call with the same words gets another response: it has a seed of its own.
        assert one_turn.token_ids[: first.start].tolist() == two_turns.token_ids[: first.start].tolist()
        # It asked for less than the run's limit.
        assert one_turn.num_sampled_tokens <= 2 and one_turn.rollout_logprobs[one_turn.loss_mask].all()


def test_rollouts_come_by_prompt_then_sample_and_repeat(attempts: Attempts):
    rollouts = members(attempts.generate(PROMPTS, group_size=3, step=1))
    expected = [(f"p{index}", sample) for index in range(5) for sample in range(3)]
    assert [(rollout.prompt.id, rollout.sample_index) for rollout in rollouts] == expected
    for rollout in rollouts:
        first = len(rollout.prompt.input)
        assert rollout.token_ids[:first].tolist() == rollout.prompt.input.token_ids.tolist()
        assert rollout.loss_mask.tolist() == [False] * first + [True] * (len(rollout.token_ids) - first)
        assert not rollout.rollout_logprobs[:first].any()
        assert all(logprob < 0 for logprob in rollout.rollout_logprobs[first:])
        words = [f"w{token}" for token in rollout.token_ids[first:] if token > 4]
        assert [word for word in rollout.text.split() if word.startswith("w")] == words
        assert "<eos>" not in rollout.text
    assert members(attempts.generate(PROMPTS, group_size=3, step=1)) == rollouts
    assert members(attempts.generate(PROMPTS, group_size=3, step=2)) != rollouts
    # Who else is asked does not matter: a prompt alone, on one engine, gets the same answers.
    alone = members(attempts.generate(PROMPTS[3:4], group_size=3, step=1))
    assert [rollout.token_ids.tolist() for rollout in alone] == [each.token_ids.tolist() for each in rollouts[9:12]]


def test_a_sampling_override_is_greedy(attempts: Attempts, folder: Path):
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    engine = TransformersEngine(TransformersConfig(), folder=folder, dtype=torch.float32, device="cpu")
    engine.gate.commit(0)
    requests = [GenerationRequest(input=prompt.input, sampling=sampling, seed=0) for prompt in PROMPTS]
    expected = [
        [*request.input.token_ids, *each.token_ids]
        for request, each in zip(requests, engine.generate(requests), strict=True)
    ]
    rollouts = members(attempts.generate(PROMPTS, group_size=1, step=0, sampling=sampling))
    assert [rollout.token_ids.tolist() for rollout in rollouts] == expected


def test_the_environment_answers_and_its_tokens_are_masked(two_turns: Attempts):
    for rollout in members(two_turns.generate(PROMPTS, group_size=2, step=1, sampling=A_WORD)):
        first, second = rollout.spans
        # The turn that was not ended by the policy is ended by the template: <user> w10 <eos> <assistant>.
        ended = [] if rollout.token_ids[first.end - 1] == EOS else [EOS]
        answer = [*ended, 3, 10, EOS, 4]
        assert rollout.token_ids[first.end : second.start].tolist() == answer
        assert rollout.loss_mask[first.end : second.start].tolist() == [False] * len(answer)
        assert rollout.rollout_logprobs[first.end : second.start].tolist() == [0.0] * len(answer)
        assert second.end == len(rollout.token_ids) == len(rollout.loss_mask) == len(rollout.rollout_logprobs)


def test_an_attempt_without_room_for_another_response_ends_by_length(group: RolloutGroup):
    short = attempts_of(group, "tests.environments:OneMoreTurn", max_positions=16)
    (rollout,) = members(
        short.generate(PROMPTS[:1], group_size=1, step=1, sampling=SamplingParams(max_tokens=6, min_tokens=6))
    )
    assert len(rollout.spans) == 1 and len(rollout.token_ids) == 9
    assert rollout.finish_reason is FinishReason.LENGTH
    short.close()


def test_groups_come_as_they_finish(group: RolloutGroup, attempts: Attempts, tmp_path: Path):
    expected = attempts.generate(PROMPTS, group_size=3, step=1)
    for engine in (0, 1):
        released = tmp_path / str(engine)
        in_engine(group, engine, hold, released)
        attempts.start([attempts.task(each, step=1) for each in groups_of(3)])
        found: list[Group] = []
        with attempts.waiting():
            first = [ended.group.id for ended in attempts.next()]
            # Until now the engine that is held had not begun.
            released.touch()
            found += first
            while len(found) < len(PROMPTS):
                found += [ended.group.id for ended in attempts.next()]
        assert sorted(found) == sorted(prompt.id for prompt in PROMPTS) and 0 < len(first) < len(PROMPTS)
    assert said(attempts.generate(PROMPTS, group_size=3, step=1)) == said(expected)


def test_groups_that_nobody_asked_for_yet_are_kept(attempts: Attempts):
    """An evaluation in the middle of attempts at prompts to train on."""
    expected = attempts.generate(PROMPTS, group_size=2, step=1)
    begun = [Group.begin(f"later {prompt.id}", prompt, 2) for prompt in PROMPTS]
    attempts.start([attempts.task(each, step=1) for each in begun])
    assert said(attempts.generate(PROMPTS, group_size=2, step=1)) == said(expected)
    found = ended_groups(attempts)
    assert said(found[group.id] for group in begun) == said(expected)


def test_attempts_that_are_cancelled_leave_the_engines_free(attempts: Attempts):
    expected = members(attempts.generate(PROMPTS, group_size=3, step=1))
    attempts.start([attempts.task(each, step=2) for each in groups_of(3)])
    attempts.cancel()
    assert members(attempts.generate(PROMPTS, group_size=3, step=1)) == expected


def lost_of(ended: Ended) -> Counter[DropReason]:
    """The number of attempts that were left out, by reason."""
    return Counter({reason: len(attempts) for reason, attempts in ended.lost.items()})


def test_interrupted_responses_go_on_where_they_were(group: RolloutGroup, attempts: Attempts):
    """What a checkpoint holds of them is the beginning of what they become, here and in a run that goes on with it."""
    sampling = SamplingParams(max_tokens=100, min_tokens=100)
    names = [prompt.id for prompt in PROMPTS]
    expected = said(attempts.generate(PROMPTS, group_size=2, step=1, sampling=sampling))
    # None of them ends between two interruptions: the 100 tokens take more than a minute and a half.
    in_both(group, slow)
    attempts.start([attempts.task(each, step=1, sampling=sampling) for each in groups_of(2)])
    tasks: list[Task] = []
    while not any(progress.begun for task in tasks for progress in task.progress):
        with attempts.interrupted() as (tasks, _):
            assert {task.group.id for task in tasks} == set(names)
    in_both(group, fast)
    for task in tasks:
        for rollout, whole in zip(task.group.rollouts, expected[names.index(task.group.id)], strict=True):
            assert rollout.token_ids.tolist() == whole[: rollout.num_tokens]
    ended = ended_groups(attempts)
    assert said(ended[name] for name in names) == expected
    attempts.start(tasks)
    ended = ended_groups(attempts)
    assert said(ended[name] for name in names) == expected


def test_a_request_on_its_way_to_an_engine_is_interrupted_too(group: RolloutGroup, attempts: Attempts, tmp_path: Path):
    """It reaches the engine after the abort. Its 100 tokens would take more than a minute and a half."""
    sampling = SamplingParams(max_tokens=100, min_tokens=100)
    expected = said(attempts.generate(PROMPTS, group_size=2, step=1, sampling=sampling))
    in_both(group, slow)
    in_engine(group, 0, hold, released := tmp_path / "request")
    attempts.start([attempts.task(each, step=1, sampling=sampling) for each in groups_of(2)])
    until((tmp_path / "request waits").exists)
    late = threading.Timer(0.5, released.touch)
    late.start()
    with attempts.interrupted() as (tasks, _):
        assert {task.group.id for task in tasks} == {prompt.id for prompt in PROMPTS}
    in_both(group, fast)
    ended = ended_groups(attempts)
    assert said(ended[prompt.id] for prompt in PROMPTS) == expected


def test_an_attempt_whose_environment_raises_is_left_out_and_counted(group: RolloutGroup):
    failing = attempts_of(group, "tests.environments:FailsOnOne")
    ended = failing.run([failing.task(each, step=1, sampling=A_WORD) for each in groups_of(2)])
    assert {name: (len(each.group.rollouts), lost_of(each)) for name, each in ended.items()} == {
        prompt.id: (0, {DropReason.FAILED: 2}) if prompt.id == "p1" else (2, {}) for prompt in PROMPTS
    }
    failing.close()


def test_an_attempt_that_takes_too_long_is_left_out(group: RolloutGroup, tmp_path: Path):
    def lost(limit_s: float) -> list[Counter[DropReason]]:
        """What is left out of each group while one engine answers none."""
        late, released = attempts_of(group, "single_turn", attempt_timeout_s=limit_s), tmp_path / f"{limit_s}"
        in_engine(group, 1, hold, released)
        ended = late.run([late.task(each, step=1) for each in groups_of(2)])
        released.touch()
        late.close()
        assert all(len(each.group.rollouts) + lost_of(each).total() == 2 for each in ended.values())
        return [lost_of(each) for each in ended.values()]

    # The other engine is to answer all of its own in time.
    kinds = [Counter[DropReason](), Counter({DropReason.TIMED_OUT: 2})]
    found = under_a_fair_limit(
        lost, lambda found: kinds[0] in found and all(each in kinds for each in found), first_s=3.0
    )
    assert all(kind in found for kind in kinds) and sum(map(found.count, kinds)) == len(PROMPTS)


def test_the_engine_ends_the_request_of_an_attempt_that_takes_too_long(group: RolloutGroup, attempts: Attempts):
    late = attempts_of(group, "single_turn", attempt_timeout_s=1.0)
    in_both(group, slow)
    # 120 tokens take at least two minutes there.
    sampling = SamplingParams(max_tokens=120, min_tokens=120)
    begun = time.monotonic()
    (ended,) = late.run([late.task(groups_of(2)[0], step=1, sampling=sampling)]).values()
    assert lost_of(ended) == {DropReason.TIMED_OUT: 2}
    answers = attempts.generate(PROMPTS, group_size=1, step=1, sampling=A_WORD)
    assert len(answers) == len(PROMPTS) and time.monotonic() - begun < 120, "the engines are free again"
    in_both(group, fast)
    late.close()


def test_an_engine_that_hangs_ends_the_wait_and_is_named(group: RolloutGroup, attempts: Attempts, tmp_path: Path):
    expected = said(attempts.generate(PROMPTS, group_size=2, step=1))
    in_engine(group, 1, hold, tmp_path / "held")
    limit, group.workers.call_timeout_s = group.workers.call_timeout_s, 2.0
    with pytest.raises(WorkerDied, match=r"generate took longer than 2 s .*rollout rank 1"):
        attempts.generate(PROMPTS, group_size=2, step=1)
    group.workers.call_timeout_s = limit
    (tmp_path / "held").touch()
    assert said(attempts.generate(PROMPTS, group_size=2, step=1)) == expected


def test_a_runner_that_dies_is_replaced_and_nothing_is_lost_or_doubled(
    group: RolloutGroup, attempts: Attempts, tmp_path: Path
):
    expected = attempts.generate(PROMPTS, group_size=3, step=1)
    in_engine(group, 0, hold, tmp_path / "held")
    attempts.start([attempts.task(each, step=1) for each in groups_of(3)])
    found: dict[str, Group] = {}
    with attempts.waiting():
        found |= {ended.group.id: ended.group for ended in attempts.next()}
        os.kill(attempts.workers.infos[0].pid, signal.SIGKILL)
        (tmp_path / "held").touch()
        while len(found) < len(PROMPTS):
            new = {ended.group.id: ended.group for ended in attempts.next()}
            assert not new.keys() & found.keys()
            found |= new
    assert said(found[prompt.id] for prompt in PROMPTS) == said(expected)
    assert attempts.metrics() == {"rollout/runner_restarts": 1.0}
    # One that dies while nothing is asked is replaced as well.
    os.kill(attempts.workers.infos[0].pid, signal.SIGKILL)
    assert said(attempts.generate(PROMPTS, group_size=3, step=1)) == said(expected)


def test_a_completion_of_another_version_is_refused(
    group: RolloutGroup, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(group, "version", 1)
    with pytest.raises(WeightSyncFailed, match="version 0, expected at least 1"):
        members(attempts.generate(PROMPTS, group_size=1, step=1))


def test_an_engine_with_unverified_weights_refuses(group: RolloutGroup, attempts: Attempts):
    group.fail("a test says so")
    with pytest.raises(WeightSyncFailed, match="not verified: a test says so"):
        members(attempts.generate(PROMPTS, group_size=1, step=1))
    group.commit(0)
    assert members(attempts.generate(PROMPTS, group_size=1, step=1))[0].spans[0].version == 0


def test_nobody_is_asked_where_no_engine_is_chosen(group: RolloutGroup):
    assert group.call(DestinationRank.digests, engines=[]) == []


def test_every_engine_scores(group: RolloutGroup):
    sequences = [prompt.input for prompt in PROMPTS]
    first, second = group.score(sequences)
    assert first == second
    assert [len(scores) for scores in first] == [len(sequence) - 1 for sequence in sequences]


def test_sleep_and_wake_change_no_answer(group: RolloutGroup, attempts: Attempts):
    expected = members(attempts.generate(PROMPTS, group_size=2, step=1))
    group.sleep()
    group.wake()
    assert members(attempts.generate(PROMPTS, group_size=2, step=1)) == expected
    assert "memory/engine_freed_bytes" not in group.metrics(), "nothing is measured on a CPU"


@pytest.mark.parametrize("error", [False, True], ids=["killed", "core"])
def test_an_engine_that_dies_while_it_samples_is_replaced_and_no_answer_is_lost_or_doubled(
    group: RolloutGroup, two_turns: Attempts, error: bool
):
    expected = said(two_turns.generate(PROMPTS, group_size=3, step=1, sampling=A_WORD))
    restarts, pids = group.num_restarts, [info.pid for info in group.workers.infos]
    # The second one is that of a second token, or of a second turn.
    in_engine(group, 1, die_at, 2, error=error)
    assert said(two_turns.generate(PROMPTS, group_size=3, step=1, sampling=A_WORD)) == expected
    assert group.num_restarts == restarts + 1
    assert group.metrics()["rollout/engine_restarts"] == restarts + 1
    assert group.workers.infos[0].pid == pids[0] and group.workers.infos[1].pid != pids[1]
    # The new engine is a full member.
    assert said(two_turns.generate(PROMPTS, group_size=3, step=1, sampling=A_WORD)) == expected


def test_both_engines_may_die_at_once(group: RolloutGroup, attempts: Attempts):
    expected = members(attempts.generate(PROMPTS, group_size=2, step=1))
    restarts = group.num_restarts
    for engine in (0, 1):
        in_engine(group, engine, die_at, 3)
    setup = group.setup
    group.setup = replace(setup, rollout=replace(setup.rollout, max_restarts=restarts + 2))
    assert members(attempts.generate(PROMPTS, group_size=2, step=1)) == expected
    assert group.num_restarts == restarts + 2
    group.setup = setup


def test_an_engine_that_dies_while_nothing_is_asked_is_replaced(group: RolloutGroup):
    sequences = [prompt.input for prompt in PROMPTS]
    scores, restarts, setup = group.score(sequences), group.num_restarts, group.setup
    rollout = replace(setup.rollout, max_restarts=restarts + 2, speculative=SpeculativeConfig())
    group.setup = replace(setup, rollout=rollout)
    os.kill(group.workers.infos[0].pid, signal.SIGKILL)
    assert group.score(sequences) == scores
    os.kill(group.workers.infos[1].pid, signal.SIGKILL)
    assert group.metrics()["rollout/engine_restarts"] == group.num_restarts == restarts + 2
    group.setup = setup


@pytest.mark.thorough
def test_engines_that_die_around_their_sleep_are_replaced(group: RolloutGroup, attempts: Attempts):
    expected = members(attempts.generate(PROMPTS, group_size=2, step=1))
    restarts, setup = group.num_restarts, group.setup
    group.setup = replace(setup, rollout=replace(setup.rollout, max_restarts=restarts + 2))
    os.kill(group.workers.infos[1].pid, signal.SIGKILL)
    group.sleep()
    os.kill(group.workers.infos[0].pid, signal.SIGKILL)
    group.wake()
    assert members(attempts.generate(PROMPTS, group_size=2, step=1)) == expected
    assert group.num_restarts == restarts + 2
    group.setup = setup


def test_one_death_too_many_ends_it_with_a_sentence(group: RolloutGroup, attempts: Attempts):
    """Comes last: it leaves a dead engine."""
    setup = group.setup
    group.setup = replace(setup, rollout=replace(setup.rollout, max_restarts=group.num_restarts))
    in_engine(group, 1, die_at, 2)
    with pytest.raises(WorkerDied, match=r"^rollout rank 1 \(pid \d+ on .*\) died in generate"):
        members(attempts.generate(PROMPTS, group_size=2, step=1))
