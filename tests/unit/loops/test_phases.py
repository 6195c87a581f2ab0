"""Phases: their times, and who is awake in them."""

import pytest

from rlframe.loops import phases as module
from rlframe.loops.phases import Phases


class Clock:
    """Stands still but for `sleep`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        """See time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """See time."""
        self.now_s += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the phases."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Role:
    """Writes down what it is told, and refuses to be told it twice."""

    def __init__(self, name: str, events: list[str]):
        self.name, self.events, self.awake = name, events, True

    def sleep(self) -> None:
        """Once."""
        assert self.awake
        self.awake = False
        self.events.append(f"{self.name} sleeps")

    def wake(self) -> None:
        """Once."""
        assert not self.awake
        self.awake = True
        self.events.append(f"{self.name} wakes")


def test_times_add_up_within_a_step_and_over_the_run(time: Clock) -> None:
    announced: list[str] = []
    phase = Phases(sharing=[], announce=announced.append)
    with phase("train"):
        time.sleep(0.02)
    with phase("reward"):
        pass
    with phase("train"):
        time.sleep(0.03)
    first = phase.next_step()
    assert list(first) == ["train", "reward"] and announced == ["train", "reward", "train"]
    assert first == pytest.approx({"train": 0.05, "reward": 0.0})
    assert phase.next_step() == {}
    with phase("train"):
        time.sleep(0.01)
    assert phase.next_step() == pytest.approx({"train": 0.01})
    assert phase.totals == pytest.approx({"train": 0.06, "reward": 0.0})


def test_a_role_is_idle_in_the_phases_of_others(time: Clock) -> None:
    policy, critic = Role("policy", []), Role("critic", [])
    phase = Phases(sharing=[], announce=lambda _: None)
    with phase("rollout"):
        time.sleep(0.03)
    with phase("train", on=policy):
        time.sleep(0.01)
    with phase("weight_sync", beside=policy):
        time.sleep(0.01)
    times = phase.step_times({"policy": policy, "critic": critic})
    own = times["time/train_s"] + times["time/weight_sync_s"]
    assert times["time/policy_idle_fraction"] == pytest.approx(1 - own / times["time/step_s"])
    assert times["time/critic_idle_fraction"] == 1.0
    with phase("rollout"):
        time.sleep(0.01)
    assert phase.step_times({"policy": policy})["time/policy_idle_fraction"] == 1.0, "each step counts for itself"


def test_the_time_of_a_phase_inside_another_counts_once(time: Clock) -> None:
    phase = Phases(sharing=[], announce=lambda _: None)
    for _ in range(2):
        with pytest.raises(KeyError), phase("weight_sync"):
            time.sleep(0.03)
            with phase("evaluation"):
                time.sleep(0.05)
            raise KeyError
        with phase("weight_sync"):
            with phase("evaluation"):
                time.sleep(0.05)
            time.sleep(0.01)
    # A phase that ends with an error counts for nothing.
    assert phase.next_step() == pytest.approx({"evaluation": 0.2, "weight_sync": 0.02})


def test_a_phase_is_announced_before_it_begins() -> None:
    events: list[str] = []
    phase = Phases(sharing=[Role("rollout", events)], announce=events.append)
    with phase("train", on=object()):
        events.append("work")
    assert events == ["train", "rollout sleeps", "work"]


def test_roles_that_share_devices_take_turns() -> None:
    events: list[str] = []
    policy, rollout = Role("policy", events), Role("rollout", events)
    phase = Phases(sharing=[policy, rollout], announce=lambda _: None)
    with phase("rollout", on=rollout):
        assert (policy.awake, rollout.awake) == (False, True)
    with phase("evaluation", on=rollout):
        pass
    with phase("reward"):  # needs no device: leaves all as they are
        pass
    with phase("train", on=policy):
        assert (policy.awake, rollout.awake) == (True, False)
    with phase("rollout", on=rollout):
        pass
    # Who is already there is left alone; who makes room goes first.
    assert events == ["policy sleeps", "rollout sleeps", "policy wakes", "policy sleeps", "rollout wakes"]


def test_a_role_that_sleeps_from_the_start_wakes_for_its_first_phase() -> None:
    events: list[str] = []
    policy, rollout = Role("policy", events), Role("rollout", events)
    policy.awake = False
    phase = Phases(sharing=[policy, rollout], announce=lambda _: None, asleep=[policy])
    with phase("rollout", on=rollout):
        pass
    with phase("train", on=policy):
        pass
    assert events == ["rollout sleeps", "policy wakes"]


def test_room_is_made_for_a_role_that_shares_devices_without_waking_it() -> None:
    events: list[str] = []
    policy, critic, rollout = (Role(name, events) for name in ("policy", "critic", "rollout"))
    announced: list[str] = []
    phase = Phases(sharing=[rollout, policy, critic], announce=announced.append)
    with phase("train", on=policy):
        phase.make_room(rollout)
        phase.make_room(rollout)
        phase.make_room("engines with devices of their own")
    assert events == ["rollout sleeps", "critic sleeps", "policy sleeps"]
    assert announced == ["train", "make_room"]
    with phase("rollout", on=rollout):
        pass
    assert events[3:] == ["rollout wakes"]


def test_making_room_belongs_to_the_phases_time(time: Clock) -> None:
    class Slow(Role):
        """Takes a moment to leave."""

        def sleep(self) -> None:
            """See above."""
            time.sleep(0.03)
            super().sleep()

    ended: list[tuple[str, object, float, float]] = []
    rollout = Slow("rollout", [])
    phase = Phases(sharing=[rollout], announce=lambda _: None, ended=lambda *each: ended.append(each))
    with phase("train", on="the policy"), phase("look"):
        time.sleep(0.01)
    assert phase.next_step() == pytest.approx({"train": 0.03, "look": 0.01})
    # A phase inside another one changed nothing.
    look, train = ("look", None, 0.01, 0.0), ("train", "the policy", 0.04, 0.03)
    assert [each[:2] for each in ended] == [look[:2], train[:2]]
    assert [each[2:] for each in ended] == [pytest.approx(look[2:]), pytest.approx(train[2:])]


def test_an_error_in_a_phase_goes_through() -> None:
    phase = Phases(sharing=[], announce=lambda _: None)
    with pytest.raises(KeyError), phase("train"):
        raise KeyError


def test_processes_that_start_anew_are_awake_and_the_others_make_room_for_them() -> None:
    events: list[str] = []
    policy, rollout = Role("policy", events), Role("rollout", events)
    phase = Phases(sharing=[rollout, policy], announce=lambda _: None)
    with phase("rollout", on=rollout):
        pass
    assert events == ["policy sleeps"]
    policy.awake = True
    phase.begin_anew(policy)
    assert events == ["policy sleeps", "rollout sleeps"]
    assert phase.next_step() == {}
    with phase("train", on=policy):
        pass
    with phase("rollout", on=rollout):
        pass
    assert events[2:] == ["policy sleeps", "rollout wakes"]


def test_a_step_is_timed_by_the_clock_and_what_no_phase_covers_is_other(time: Clock) -> None:
    phases = Phases(sharing=[], announce=lambda name: None)
    time.sleep(0.05)  # before the step's first phase
    with phases("rollout"):
        time.sleep(0.02)
    time.sleep(0.03)
    with phases("train"):
        time.sleep(0.01)
    assert phases.step_times({}) == pytest.approx(
        {"time/rollout_s": 0.02, "time/train_s": 0.01, "time/other_s": 0.03, "time/step_s": 0.06}
    )
    with phases("train"):
        time.sleep(0.01)
    assert phases.step_times({}) == pytest.approx({"time/train_s": 0.01, "time/other_s": 0.0, "time/step_s": 0.01})
