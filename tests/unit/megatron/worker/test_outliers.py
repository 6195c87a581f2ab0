"""Steps that are skipped: by a bound, by the running median, and after a resume."""

from rlframe.megatron.config.optimizer import OptimizerConfig


def outliers(**settings: float):  # noqa: ANN201
    """Returns the rule of these settings."""
    from rlframe.megatron.worker.outliers import Outliers  # noqa: PLC0415 - imports Megatron

    return Outliers(OptimizerConfig(**settings))


def test_norms_above_the_bound_are_skipped_and_counted() -> None:
    rule = outliers(skip_norm_above=2.0)
    assert [rule.skips(norm) for norm in (1.0, 2.0, 2.1, 1.0, 50.0)] == [False, False, True, False, True]
    assert rule.skipped == 2


def test_multiples_of_the_median_are_skipped_once_there_are_ten_norms() -> None:
    rule = outliers(skip_outlier_factor=3.0)
    assert not any(rule.skips(norm) for norm in (1.0, 9.0, 1.0, 1.0, 9.0, 1.0, 1.0, 9.0, 1.0))
    assert not rule.skips(9.0), "nine norms are too few"
    assert not rule.skips(3.0) and rule.skips(3.1)


def test_a_lasting_rise_is_followed() -> None:
    rule = outliers(skip_outlier_factor=3.0)
    assert not any(rule.skips(1.0) for _ in range(20))
    skipped = [rule.skips(10.0) for _ in range(30)]
    # After twenty more of the new norms half of all are new: the median is between 1 and 10, and then 10.
    assert skipped == [True] * 20 + [False] * 10


def test_the_smaller_of_two_bounds_decides() -> None:
    rule = outliers(skip_norm_above=2.0, skip_outlier_factor=3.0)
    assert rule.skips(2.5), "the median says nothing yet"
    assert not any(rule.skips(0.1) for _ in range(20))
    assert rule.skips(0.5)


def test_a_resumed_rule_decides_as_the_one_before(monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    settings = {"skip_norm_above": 60.0, "skip_outlier_factor": 1.5}
    norms = [float(index * 37 % 101) for index in range(180)]
    for cut in (0, 4, 130):
        before, after = outliers(**settings), outliers(**settings)
        for norm in norms[:cut]:
            before.skips(norm)
        after.load({name: entry.data for name, entry in before.state().items()})
        assert after.skipped == before.skipped
        assert [after.skips(norm) for norm in norms[cut:]] == [before.skips(norm) for norm in norms[cut:]]
