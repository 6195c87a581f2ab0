"""The page of a run in a browser: it draws, and runs nothing that a model wrote."""

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlframe.loops.report.page import write_page
from rlframe.loops.reporting.warned import Warned
from rlframe.utils.errors import RewardError
from tests.unit.loops.report.runs import HOSTILE, record, run_folder, write_samples

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom")
PHONE = 500
"""Width in pixels of the narrowest window that Chromium makes."""
ASKS = """<script>
addEventListener("error", (event) => { document.body.className = event.message; });
function dispatch(key) { document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })); }
setTimeout(() => { QUESTION }, 2000);
</script></body>"""
KEYS = '[..."1234567j4ckd", "ArrowRight", "ArrowRight"].forEach(dispatch);'
"""Opens all parts of the page, one after the other, and ends at a token of a rollout."""
RANGES = """document.body.dataset.said = JSON.stringify(Object.fromEntries(
  [...document.querySelectorAll("section.card")].map((card) =>
    [card.querySelector("h3").firstChild.data, card.querySelector(".chart")._fullLayout?.yaxis.range])))"""
"""Says from where to where the axis of each curve goes."""
WIDTHS = """document.body.dataset.said = JSON.stringify([..."1234567"].map((key) => {
  dispatch(key);
  return document.documentElement.scrollWidth;
}))"""
"""Says how wide each part of the page is."""

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium"),
]


def test_every_part_draws_and_no_text_becomes_html(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run", text=HOSTILE, name=HOSTILE)
    write_samples(output, record(4, text=HOSTILE, tokens=1))
    dom = opened([output], tmp_path, KEYS)
    shown = dom[dom.index("<body") : dom.index('id="library"')]
    assert shown.startswith("<body>"), shown[:200]
    assert "<title>owned" not in dom and "<img" not in shown
    assert "&lt;/script&gt;&lt;script&gt;document.title='owned'" in shown
    assert "engine logprob" in shown and 'class="chosen"' in shown


def test_a_curve_below_zero_is_in_view_and_one_of_zeros_begins_at_zero(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run")
    lines = [{"step": step, "reward/mean": 0.0, "train/loss": step - 3.0} for step in range(1, 5)]
    (output / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    ranges = said(opened([output], tmp_path, RANGES))
    assert ranges["train/loss"][0] < -2.0 and ranges["train/loss"][1] > 1.0
    assert ranges["reward/mean"][0] == 0.0


def test_time_between_steps_is_in_the_sum(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run", steps=1)
    phases = [
        {"name": "train", "role": "policy", "start_s": 1.0, "end_s": 2.0},
        {"name": "evaluation", "role": "rollout", "start_s": 2.0, "end_s": 5.0},
    ]
    (output / "timeline.jsonl").write_text("".join(json.dumps({"step": 1, "phases": [each]}) + "\n" for each in phases))
    dom = opened([output], tmp_path, "")
    assert "Most time went to evaluation (75 %) and train (25 %)." in dom


def test_the_error_that_ended_a_run_comes_first(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run", steps=3)
    warned = Warned(output, step=lambda: 4, anew=True)
    warned.note_failure(RewardError("no reward scored anything"))
    warned.close()
    dom = opened([output], tmp_path, "")
    assert "<b>The run ended early, after step 3: </b>no reward scored anything" in dom
    assert "There were no warnings." in dom, "an error is no warning"


def test_a_token_without_a_finite_logprob_has_no_gap(tmp_path: Path) -> None:
    tokens = "{ sampled: [1, 1, 1, 0], rollout_logprobs: [-1, -1, null, 0], trainer_logprobs: [-0.5, null, -1, 0] }"
    question = f"document.body.dataset.said = JSON.stringify([0, 1, 2, 3].map((place) => gapOf({tokens}, place)))"
    assert said(opened([run_folder(tmp_path / "run")], tmp_path, question)) == [0.5, None, None, None]


def test_no_part_is_wider_than_a_phone(tmp_path: Path) -> None:
    one, two = (
        run_folder(tmp_path / "one"),
        run_folder(tmp_path / "two", a_setting_of_a_long_name={"inside": "x" * 200}),
    )
    assert max(said(opened([one], tmp_path, WIDTHS, f"--window-size={PHONE},900"))) <= PHONE
    assert max(said(opened([one, two], tmp_path, WIDTHS, f"--window-size={PHONE},900"))) <= PHONE


def opened(outputs: list[Path], folder: Path, question: str, *options: str) -> str:
    """Returns the page of runs as a browser has it after a script, which asked it something."""
    assert BROWSER
    page = folder / "page.html"
    write_page(outputs, page)
    asking = ASKS.replace("QUESTION", question)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", asking), encoding="utf-8")
    command = [BROWSER, *OPTIONS, *options, f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def said(dom: str) -> Any:
    """Returns what a script found out."""
    return json.loads(html.unescape(dom.split('data-said="', 1)[1].split('"', 1)[0]))
