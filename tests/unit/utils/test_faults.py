"""Faults: one sentence of each kind, and settings that stand elsewhere."""

import pickle

import pytest

from rlframe.utils.errors import ConfigError, SettingError
from rlframe.utils.faults import Fault, Key


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("a.b", "must be at least 1", got=0), "a.b must be at least 1, got 0"),
        (Fault("a", "has no effect", got=True, why="w", hint="remove it"), "a has no effect, got true: w; remove it"),
        (
            Fault("a", "needs the package p", got="x", stated=True, hint="install it"),
            "a=x needs the package p; install it",
        ),
        (Fault("a", said=ValueError("no file")), "a: no file"),
        (Fault("a", got="x", stated=True, said="no file"), "a=x: no file"),
        (Fault("", said="a sentence"), "a sentence"),
        (Fault("a", said="no file", hint="write one"), "a: no file; write one"),
        (Fault("", "4 ranks need 4 devices", hint="use less"), "4 ranks need 4 devices; use less"),
        (Fault(Key(("a", 1, "b.c")), "must be given"), "a[1].b.c must be given"),
    ],
)
def test_a_fault_is_a_sentence(fault: Fault, text: str) -> None:
    assert str(fault) == text


def test_a_fault_moves_with_all_keys_that_it_names_and_with_no_word() -> None:
    rule = ("must be a multiple of ", Key.of("train.num_minibatches"), "=2 (trained, train.lr)")
    moved = Fault("model.path", rule, got="x").moved({"train": "critic.train", "model": "critic.model"})
    assert moved.key == ("critic", "model", "path")
    assert (
        str(moved)
        == "critic.model.path must be a multiple of critic.train.num_minibatches=2 (trained, train.lr), got x"
    )
    assert Fault("training.x", "r").moved({"train": "critic.train"}) == Fault("training.x", "r")


def test_errors_with_faults_cross_process_borders() -> None:
    error = pickle.loads(pickle.dumps(ConfigError([Fault("a.b", "must be 1", got=2), "a sentence"])))
    assert error.faults == [Fault("a.b", "must be 1", got=2), Fault("", said="a sentence")]
    assert str(error) == "the configuration has 2 faults:\n  - a.b must be 1, got 2\n  - a sentence"
    assert str(pickle.loads(pickle.dumps(SettingError("b", "must be 1", got=2)))) == "b must be 1, got 2"
