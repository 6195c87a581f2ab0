"""The page of a run: what is in it, what cannot get out of it, and how large it gets."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlframe.loops.report import page
from rlframe.loops.report.attempts import attempts, spread
from rlframe.loops.report.curves import MOST_POINTS, curves
from rlframe.loops.report.meanings import FIRST, meaning
from rlframe.loops.report.page import run_of, write_page
from rlframe.loops.report.refresh import EVERY_S, SHARE, Page, Refresh
from rlframe.loops.reporting.warned import Warned
from rlframe.utils.errors import OutputError, RewardError
from tests.unit.loops.report.runs import HOSTILE, record, run_folder, write_samples
from tests.until import until

LIBRARY = b"window.Plotly = {};"


@pytest.fixture(autouse=True)
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of a few bytes, which compresses at once."""
    monkeypatch.setattr(page, "library", lambda: page.packed(LIBRARY))


def content_of(file: Path) -> dict[str, Any]:
    """The data in a page."""
    text = file.read_text(encoding="utf-8")
    [block] = re.findall(r'<script type="text/plain" id="content">([^<]*)</script>', text)
    return json.loads(gzip.decompress(base64.b64decode(block)))


def test_a_page_has_what_the_run_left(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run")
    size = write_page([output], output / "report.html")
    assert size == (output / "report.html").stat().st_size
    [run] = content_of(output / "report.html")["runs"]
    assert (run["name"], run["done"], run["steps"], run["overrides"]) == ("it", 3, 3, ["train.lr=1e-3"])
    assert run["settings"]["train.lr"] == 1e-3
    assert [curve["name"] for curve in run["curves"]] == ["reward/mean", "train/loss", "time/step_s", "time/train_s"]
    assert run["curves"][0] == {
        "name": "reward/mean",
        "meaning": meaning("reward/mean"),
        "first": True,
        "steps": [1, 2, 3],
        "values": [0.1, 0.2, 0.3],
    }
    assert run["curves"][1]["values"] == [None] * 3
    assert run["warnings"] == [{"text": "four", "of": "m", "roles": ["driver"], "first": 1, "last": 2, "count": 2}]
    assert [each["step"] for each in run["attempts"]] == [1, 2, 3]
    assert run["times"]["roles"] == [{"role": "policy", "phases": {"train": 1.0}, "idle_s": 0.0}]
    assert run["ended"] == {}


def test_meanings_are_those_of_the_documentation() -> None:
    documented = {name for name in FIRST if name != "evaluation/loss"}
    assert [name for name in documented if not meaning(name)] == []
    assert (
        meaning("reward/std") == "Its standard deviation over attempts. Healthy: above 0. At 0 nothing can be learnt."
    )
    assert meaning("reward/exact_match_mean").startswith("Mean of one part, before its weight")
    assert meaning("nobody/knows") == ""


def test_text_of_a_model_is_nowhere_in_the_page_itself(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run", text=HOSTILE, name=HOSTILE)
    write_page([output], output / "report.html")
    text = (output / "report.html").read_text(encoding="utf-8")
    assert "owned" not in text and text.count("</script>") == 3
    [run] = content_of(output / "report.html")["runs"]
    assert run["attempts"][0]["response"].endswith(r"\u001b[2J\u202e")


def test_the_page_makes_no_html_of_texts_and_loads_nothing() -> None:
    scripts = "\n".join(page.asset(f"{name}.js") for name in page.SCRIPTS)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|fetch\(", scripts)
    frame = page.asset("page.html")
    assert "default-src 'none'" in frame and not re.search(r"(src|href)=", frame)
    assert all(text.isascii() for text in (scripts, frame, page.asset("page.css")))


def test_several_runs_share_a_page_and_its_room(tmp_path: Path) -> None:
    outputs = [run_folder(tmp_path / name, train={"lr": lr}) for name, lr in (("a", 1e-3), ("b", 1e-4))]
    write_page(outputs, tmp_path / "report.html")
    assert [run["settings"]["train.lr"] for run in content_of(tmp_path / "report.html")["runs"]] == [1e-3, 1e-4]


def test_files_that_are_missing_or_half_written_leave_gaps(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run")
    for name in ("timeline.jsonl", "warnings.jsonl", "overrides.yaml"):
        (output / name).unlink()
    with (output / "metrics.jsonl").open("a") as out:
        out.write('{"step": 4, "rew')
    (output / "ledger.jsonl").write_text("{}\n")
    run = run_of(output)
    assert (run["done"], run["warnings"], run["overrides"], run["times"]["roles"]) == (3, [], [], [])
    assert "ledger.jsonl:1 is damaged" in run["ended"]["trouble"]


def test_where_the_data_ended(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run")
    events = [
        *({"event": "leased", "step": 1, "lease": lease, "prompt": "p", "epoch": 0} for lease in range(3)),
        {"event": "trained", "step": 1, "lease": 0, "trained_at": 1, "version": 0, "tokens": [3, 4], "oldest": 0,
         "newest": 0, "lag_sum": 0, "lag_tokens": 7, "lost": {"timed_out": [2]}},
        {"event": "dropped", "step": 1, "lease": 1, "reason": "flat_all_right", "tokens": 5, "lengths": [5]},
    ]  # fmt: skip
    (output / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = run_of(output)["ended"]
    assert (found["leased"], found["in_flight"], found["lost_attempts"]) == (3, 1, {"timed_out": 1})
    assert [(row["reason"], row["groups"], row["tokens"]) for row in found["rows"]] == [
        ("trained", 1, 7),
        ("flat_all_right", 1, 5),
    ]
    assert all(row["meaning"] for row in found["rows"])


def test_the_error_that_ended_a_run_is_told_until_it_goes_on(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run", steps=3)
    (output / "warnings.jsonl").unlink()
    warned = Warned(output, step=lambda: 4, anew=True)
    warned.note("slow")
    warned.note_failure(RewardError("no reward scored anything"))
    warned.close()
    run = run_of(output)
    assert run["failure"] == {"step": 4, "text": "no reward scored anything"}
    assert [each["text"] for each in run["warnings"]] == ["slow"]
    with (output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 0.5}) + "\n")
    assert run_of(output)["failure"] is None


def test_a_folder_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is not the folder of a run"):
        write_page([tmp_path], tmp_path / "report.html")


def test_attempts_of_steps_between_go_where_there_is_no_room(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run", steps=1)
    write_samples(output, *(record(step, text=f"{step}", tokens=50) for step in range(1, 10)))
    assert [each["step"] for each in attempts(output)] == list(range(1, 10))
    one = len(gzip.compress(json.dumps(record(1, tokens=50)).encode(), 1))
    kept = [each["step"] for each in attempts(output, most_bytes=3 * one)]
    assert kept == [1, 5, 9]


@pytest.mark.parametrize(("count", "order"), [(0, []), (1, [0]), (2, [1, 0]), (5, [4, 0, 2, 1, 3])])
def test_spread_halves_gaps(count: int, order: list[int]) -> None:
    assert spread(count) == order


def test_a_long_curve_is_thinned_and_keeps_its_last_point() -> None:
    [curve] = curves({"step": step, "x/y": step} for step in range(1, 2 * MOST_POINTS + 2))
    assert len(curve["steps"]) <= MOST_POINTS and curve["steps"][-1] == 2 * MOST_POINTS + 1


def test_pages_during_a_run_are_rare_and_the_last_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = run_folder(tmp_path / "run")
    now = 1000.0
    monkeypatch.setattr("rlframe.loops.report.refresh.time.monotonic", lambda: now)
    refresh = Refresh(output)
    refresh(1, {})
    (output / "report.html").unlink()
    now += EVERY_S - 1
    refresh(2, {})
    assert not (output / "report.html").exists()
    now += 1
    refresh(3, {})
    assert (output / "report.html").exists()
    (output / "report.html").unlink()
    refresh.close(failed=False)
    assert (output / "report.html").exists()


def test_a_page_that_takes_long_is_made_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = 1000.0, 0.0

    def write(outputs: list[Path], to: Path) -> None:
        nonlocal spent
        spent += 0.5

    monkeypatch.setattr("rlframe.loops.report.refresh.write_page", write)
    monkeypatch.setattr("rlframe.loops.report.refresh.time.monotonic", lambda: now)
    monkeypatch.setattr("rlframe.loops.report.refresh.time.thread_time", lambda: spent)
    refresh = Refresh(tmp_path)
    refresh.write()
    now += 0.5 / SHARE - 1
    assert not refresh.is_due
    now += 1
    assert refresh.is_due


def test_steps_without_a_page_do_not_wake_its_thread(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run")
    page_of_run = Page(output)
    page_of_run(1, {})
    until(lambda: not page_of_run._tracker.is_due, what="the first page is written")
    put = page_of_run._waiting.unfinished_tasks
    page_of_run(2, {})
    page_of_run.samples(2, [])
    assert page_of_run._waiting.unfinished_tasks == put == 1
    (output / "report.html").unlink()
    page_of_run.close()
    assert (output / "report.html").exists()


@pytest.mark.parametrize(
    ("given", "there"),
    [
        ([1, None, True], [1, None, True]),
        ([0.5, float("nan"), 10**400], [0.5, None, 10**400]),
        ([0.5, float("inf")], [0.5, None]),
        (["a", "b\x1b"], ["a", "b\\u001b"]),
        (["a", "\ud800"], ["a", "\\ud800"]),
        ([["a\u202e"], {"b\x1b": 1.0}], [["a\\u202e"], {"b\\u001b": 1.0}]),
    ],
)
def test_what_people_see_is_harmless_and_what_is_harmless_stays(given: list[Any], there: list[Any]) -> None:
    assert page.shown(given) == there and page.shown({"x": [given]}) == {"x": [there]}


def test_profiled_steps_are_linked_from_where_the_page_is(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run")
    for step in (2, 10):
        (output / "profiles" / f"step_{step}" / ".engines_0").mkdir(parents=True)
        (output / "profiles" / f"step_{step}" / "policy_0.json.gz").touch()
    (output / "profiles" / "step_10" / "summary.md").touch()
    (output / "profiles" / "nsys").mkdir()
    (tmp_path / "compared").mkdir()
    write_page([output], tmp_path / "compared" / "report.html")
    [run] = content_of(tmp_path / "compared" / "report.html")["runs"]
    assert [each["step"] for each in run["profiles"]] == [2, 10]
    assert run["profiles"][1]["files"] == [
        {"name": "summary.md", "address": "../run/profiles/step_10/summary.md"},
        {"name": "policy_0.json.gz", "address": "../run/profiles/step_10/policy_0.json.gz"},
    ]
    assert run_of(output)["profiles"][0]["files"][0]["address"] == "profiles/step_2/policy_0.json.gz"
