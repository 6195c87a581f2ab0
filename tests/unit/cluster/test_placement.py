"""How many devices a run needs, who gets which, and what each sees."""

import pytest

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.placement import Bundle, deal, divide, visible_devices
from rlframe.cluster.roles import Place, Role, Topology, auxiliary, engines, policy


@pytest.mark.parametrize(
    ("num_ranks", "num_engines", "colocated", "split"),
    [(1, 1, 1, 2), (4, 2, 4, 6), (2, 4, 4, 6), (4, 0, 4, 4)],
)
def test_devices_are_shared_or_added_up(num_ranks: int, num_engines: int, colocated: int, split: int) -> None:
    for colocate, count in ((True, colocated), (False, split)):
        assert Topology((policy(num_ranks), engines(num_engines, colocate=colocate))).num_devices == count


def test_an_engine_of_several_devices_needs_that_many() -> None:
    for colocate, count in ((True, 8), (False, 12)):
        assert Topology((policy(4), engines(2, devices_per_engine=4, colocate=colocate))).num_devices == count


def on_nodes(*sizes: int) -> list[Bundle]:
    """Bundles on nodes a, b, ... with that many GPUs each, numbered from 0 on every node."""
    places = [(node, gpu) for node, size in zip("abc", sizes, strict=False) for gpu in range(size)]
    return [Bundle(index=index, node=node, gpu=str(gpu)) for index, (node, gpu) in enumerate(places)]


def names(slots: list[tuple[Bundle, ...]]) -> list[str]:
    """Such as `a0 a1` for each slot."""
    return [" ".join(f"{bundle.node}{bundle.gpu}" for bundle in slot) for slot in slots]


def test_colocated_ranks_and_engines_share_devices_from_the_first_on() -> None:
    dealt = deal(on_nodes(4), Topology((policy(4), engines(2, devices_per_engine=2, colocate=True))))
    assert dealt is not None
    assert names(dealt["policy"]) == ["a0", "a1", "a2", "a3"]
    assert names(dealt["engines"]) == ["a0 a1", "a2 a3"]


def test_split_engines_come_after_the_policy() -> None:
    dealt = deal(on_nodes(4), Topology((policy(2), engines(1, devices_per_engine=2, colocate=False))))
    assert dealt is not None
    assert (names(dealt["policy"]), names(dealt["engines"])) == (["a0", "a1"], ["a2 a3"])


def test_engines_may_share_devices() -> None:
    pairs = engines(4, devices_per_engine=2, engines_per_device=2, colocate=True)
    assert pairs.num_devices == 4 and pairs.setting.startswith("rollout.num_engines (4 of 2 devices, 2 on each device)")
    dealt = deal(on_nodes(4), Topology((policy(4), pairs)))
    assert dealt is not None
    assert names(dealt["engines"]) == ["a0 a1", "a0 a1", "a2 a3", "a2 a3"]
    # A rank and the workers of two engines, of which each engine's first device has the actor.
    assert divide(dealt) == {index: 0.9 / 3 for index in range(4)}


def test_an_engine_does_not_span_nodes() -> None:
    # Node a has one device left over by engine 0; engine 1 begins on node b.
    pairs = engines(2, devices_per_engine=2, colocate=True)
    dealt = deal(on_nodes(3, 2), Topology((policy(5), pairs)))
    assert dealt is not None and names(dealt["engines"]) == ["a0 a1", "b0 b1"]
    assert deal(on_nodes(3, 1), Topology((policy(4), pairs))) is None


@pytest.mark.parametrize(
    ("num_ranks", "num_engines", "sizes", "ranks", "first", "last"),
    [
        (6, 2, (8, 6), "a0 a1 a2 a3 b4 b5", "a4 a5 a6 a7", "b0 b1 b2 b3"),
        (2, 3, (8, 6), "b4 b5", "a0 a1 a2 a3", "b0 b1 b2 b3"),
    ],
)
def test_engines_get_whole_nodes_devices_first_where_ranks_would_cut_them(
    num_ranks: int, num_engines: int, sizes: tuple[int, ...], ranks: str, first: str, last: str
) -> None:
    topology = Topology((policy(num_ranks), engines(num_engines, devices_per_engine=4, colocate=False)))
    dealt = deal(on_nodes(*sizes), topology)
    assert dealt is not None and " ".join(names(dealt["policy"])) == ranks
    found = names(dealt["engines"])
    assert (len(found), found[0], found[-1]) == (num_engines, first, last)


@pytest.mark.parametrize(
    ("critic", "colocated", "split"),
    # A policy of 4 ranks and 2 engines. A critic of 2 ranks fits on the policy's devices, one of 6 needs 2 more; on its
    # own it adds what it is, and colocated engines may then use its devices too.
    [
        (auxiliary("critic", 2, colocate=True), 4, 6),
        (auxiliary("critic", 6, colocate=True), 6, 8),
        (auxiliary("critic", 2, colocate=False), 6, 8),
    ],
)
def test_a_critic_shares_the_policys_devices_or_adds_its_own(critic: Role, colocated: int, split: int) -> None:
    for colocate, count in ((True, colocated), (False, split)):
        assert Topology((policy(4), critic, engines(2, colocate=colocate))).num_devices == count


def test_a_colocated_critic_leaves_each_of_three_roles_a_third() -> None:
    critic, teacher = auxiliary("critic", 1, colocate=True), auxiliary("teacher", 1, colocate=False)
    dealt = deal(on_nodes(4), Topology((policy(2), critic, teacher, engines(3, colocate=True))))
    assert dealt is not None
    assert {role: names(slots) for role, slots in dealt.items()} == {
        "policy": ["a0", "a1"],
        "critic": ["a0"],
        "teacher": ["a2"],
        "engines": ["a0", "a1", "a2"],
    }
    shares = divide(dealt)
    # Policy, critic, engine; policy, engine; teacher, engine. All fit, and one more would not.
    assert shares == {0: pytest.approx(0.3), 1: pytest.approx(0.45), 2: pytest.approx(0.45)}
    for index, count in ((0, 3), (1, 2), (2, 2)):
        assert count * shares[index] <= 1 < (count + 1) * shares[index]


def test_a_critic_of_its_own_comes_after_the_policy_and_before_the_engines() -> None:
    critic = auxiliary("critic", 1, colocate=False)
    dealt = deal(on_nodes(4), Topology((policy(2), critic, engines(1, colocate=False))))
    assert dealt is not None
    assert (names(dealt["critic"]), names(dealt["engines"])) == (["a2"], ["a3"])


def test_a_teachers_engines_get_whole_nodes_devices() -> None:
    pairs = Role(name="teacher_engines", num_actors=2, devices_per_actor=2, place=Place.OWN, setting="teacher.engine")
    topology = Topology((policy(1), pairs, engines(1, colocate=True)))
    assert topology.num_devices == 5
    dealt = deal(on_nodes(3, 2), topology)
    assert dealt is not None and names(dealt["teacher_engines"]) == ["a1 a2", "b0 b1"]
    # If the policy had one of a's two devices, b's three would make one engine only.
    dealt = deal(on_nodes(2, 3), topology)
    assert dealt is not None and {role: names(devices) for role, devices in dealt.items()} == {
        "policy": ["b2"], "teacher_engines": ["a0 a1", "b0 b1"], "engines": ["a0"],
    }  # fmt: skip
    assert deal(on_nodes(1, 1, 3), topology) is None


def test_a_message_names_the_critics_key() -> None:
    critic = auxiliary("critic", 2, colocate=False)
    assert str(Topology((policy(4), critic, engines(2, colocate=True)))) == (
        "train.parallel (4 ranks), critic (2 ranks, critic.colocate=false) and rollout.num_engines (2) with "
        "cluster.colocate=true"
    )


def test_an_actor_sees_its_own_gpus_first_and_the_others_of_its_node_after_them() -> None:
    bundles = on_nodes(4, 2)
    shown = visible_devices((bundles[2], bundles[3]), bundles)
    assert shown == {"CUDA_VISIBLE_DEVICES": "2,3,0,1", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert visible_devices((bundles[5],), bundles)["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_on_a_cpu_nothing_is_set() -> None:
    bundle = Bundle(index=0, node="a", gpu=None)
    assert visible_devices((bundle,), [bundle]) == {}


@pytest.mark.parametrize("name", ["stall_warning_s", "phase_timeout_s", "start_timeout_s"])
def test_time_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be above 0 \(a week at most\), got 0"):
        ClusterConfig(**{name: 0})


def test_a_limit_that_no_phase_could_come_under_by_what_it_took_is_refused() -> None:
    # The floor of limits is 5 warnings, 5 * 60 s = 300 s; a ceiling of 300 s leaves nothing between.
    with pytest.raises(ValueError, match=r"stall_warning_s must be less than 0.2 of phase_timeout_s=300, got 60"):
        ClusterConfig(phase_timeout_s=300)
    assert ClusterConfig(phase_timeout_s=301).stall_warning_s == 60
