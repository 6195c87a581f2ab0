"""The benchmark of algorithms: every case composes, and table and plot say what the curves say."""

import sys
from pathlib import Path

import pytest

from rlframe.run.load import load

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import algorithms
import curves_svg

pytestmark = pytest.mark.later

CASES = [(name, case) for name, section in algorithms.SECTIONS.items() for case in section.cases]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_case_composes(name: str, case: str) -> None:
    section = algorithms.SECTIONS[name]
    job = algorithms.Job(section=section, case=case, seed=7, smoke=True, more=("logging.samples_per_step=3",))
    run = load(section.cases[case].config, job.overrides())
    assert run.seed == 7 and run.steps == section.smoke["steps"] and run.logging.samples_per_step == 3


def test_a_curve_counts_what_was_sampled_up_to_each_evaluation() -> None:
    key = algorithms.ONLINE.metric
    lines = [
        {"step": 0, key: 0.25},
        {"step": 1, "critic/loss": 1.0, "rollout/sampled": 10.0},
        {"step": 2, "train/loss": 1.0, "rollout/sampled": 30.0},
        {"step": 2, key: 0.5},
    ]
    assert algorithms.curve(lines, algorithms.ONLINE) == [(0.0, 0.25), (40.0, 0.5)]


def test_table_and_plot_of_cases_of_different_lengths(tmp_path: Path) -> None:
    curves = {
        "short": [[(0.0, 0.2), (100.0, 0.6)], [(0.0, 0.2), (100.0, 0.8)]],
        "long": [[(0.0, 0.2), (200.0, 0.6)], [(0.0, 0.2), (200.0, 1.0)]],
    }
    # At 100 the long ones are half way: 0.4 and 0.6.
    assert algorithms.table(algorithms.ONLINE, curves).splitlines()[2:] == [
        "| short | 0.200 | 0.700 (0.600 to 0.800) | 0.700 (0.600 to 0.800) | 100 |",
        "| long | 0.200 | 0.500 (0.400 to 0.600) | 0.800 (0.600 to 1.000) | 200 |",
    ]
    drawn = {name: algorithms.over_seeds(runs) for name, runs in curves.items()}
    assert drawn["long"] == [(0.0, 0.2, 0.2, 0.2), (200.0, 0.8, pytest.approx(0.6), 1.0)]
    curves_svg.draw(tmp_path / "a.svg", drawn, title="a < b", x_label="x", y_label="y")
    text = (tmp_path / "a.svg").read_text()
    # 530 pixels are 200; 330 are 0.8, from 370 upwards: 0.7 of the short ones is 0.5 of 0.8 up.
    assert 'points="60.0,370.0 325.0,163.8"' in text and "a &lt; b" in text and text.count("<polyline") == 2
