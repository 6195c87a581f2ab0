"""The page of a run in a browser: it draws, and runs nothing that a model wrote."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rlframe.loops.report.page import write_page
from tests.unit.loops.report.runs import HOSTILE, record, run_folder, write_samples

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom")
KEYS = """<script>
addEventListener("error", (event) => { document.body.className = event.message; });
setTimeout(() => [..."1234567j4ckd", "ArrowRight", "ArrowRight"].forEach(dispatch), 2000);
function dispatch(key) { document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })); }
</script></body>"""
"""Opens all parts of the page, one after the other, and ends at a token of a rollout."""

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium"),
]


def test_every_part_draws_and_no_text_becomes_html(tmp_path: Path) -> None:
    assert BROWSER
    output = run_folder(tmp_path / "run", text=HOSTILE, name=HOSTILE)
    write_samples(output, record(4, text=HOSTILE, tokens=1))
    page = output / "report.html"
    write_page([output], page)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", KEYS), encoding="utf-8")
    command = [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    shown = done.stdout[done.stdout.index("<body") : done.stdout.index('id="library"')]
    assert shown.startswith("<body>"), shown[:200]
    assert "<title>owned" not in done.stdout and "<img" not in shown
    assert "&lt;/script&gt;&lt;script&gt;document.title='owned'" in shown
    assert "engine logprob" in shown and 'class="chosen"' in shown
