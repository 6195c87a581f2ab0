"""The site of docs/ builds strictly, without a network: links, anchors, images and the navigation."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.meta.checkout import ROOT

# Said by the theme at every import.
os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")

pytest.importorskip("material", reason="the extra docs is not installed")
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

pytestmark = pytest.mark.later

SITE = ROOT / "docs" / "site" / "mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(SITE), site_dir=str(folder)))
    return folder


def test_every_page_is_there_and_asks_no_other_host(site: Path) -> None:
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} | {"index", "settings", "families", "changelog"}
    assert pages <= {page.stem for page in site.glob("*.html")}
    loaded = re.compile(r"<(?:script|img|link)[^>]*(?:src|href)=\"?(https?://[^\"> ]+)")
    assert {url for page in site.glob("*.html") for url in loaded.findall(page.read_text(encoding="utf-8"))} == set()


def test_every_setting_has_its_docstring(site: Path) -> None:
    text = (site / "settings.html").read_text(encoding="utf-8")
    for known in ("train.optimizer.lr", "algorithm.group_size", "reward.parts.NAME.options", "rollout.tp"):
        assert known in text
    assert "Seed of the data order, of sampling and of initialisation." in text


@pytest.mark.thorough
def test_links_that_lead_nowhere_and_lost_pages_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("docs", "examples", "README.md", "CHANGELOG.md", "SECURITY.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "rlframe").symlink_to(ROOT / "rlframe")
    (tmp_path / "docs" / "lost.md").write_text(
        "# Lost\n\n[a](nowhere.md) ![b](no.svg) [c](data.md#no-such) [d](../x.md)\n"
    )
    with pytest.raises(Abort):
        build(load_config(str(tmp_path / "docs" / "site" / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    said = caplog.text
    assert all(part in said for part in ("lost.md", "'nowhere.md'", "'no.svg'", "anchor '#no-such'", "'x.md'")), said
