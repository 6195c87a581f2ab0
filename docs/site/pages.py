"""Hook of MkDocs: adds pages that lie elsewhere in the repository or are generated, and mends links to them."""

import logging
import re
import sys
from functools import cache
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(FOLDER))

import reference  # noqa: E402 - beside this file

ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "rlframe/models/README.md": "families.md",
}
"""Pages of the site that are files of the repository, by their path there."""
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
logger = logging.getLogger("mkdocs.hooks.pages")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files of ELSEWHERE, the images that README shows, and the reference of all settings."""
    for path, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for image in images():
        files.append(File.generated(config, f"images/{image.name}", abs_src_path=str(image)))
    files.append(File.generated(config, "settings.md", content=reference.page()))
    return files


@cache
def images() -> list[Path]:
    """Returns the images of the repository that a page shows."""
    pages = [ROOT / path for path in ELSEWHERE] + sorted(FOLDER.parent.glob("*.md"))
    found = {
        (page.parent / match["target"]).resolve()
        for page in pages
        for match in LINK.finditer(page.read_text(encoding="utf-8"))
        if match["text"].startswith("!")
    }
    return sorted(path for path in found if path.suffix in (".svg", ".png") and path.is_file())


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page with its links into the repository turned into links of the site."""
    paths = {name: path for path, name in ELSEWHERE.items()}
    here = PurePosixPath(paths.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def mended(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (ROOT / here / target).resolve()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if name in ELSEWHERE:
            return f"{match['text']}({ELSEWHERE[name]}{anchor})"
        if path in images():
            return f"{match['text']}(images/{path.name})"
        if name.startswith("docs/") or not path.exists():
            return f"{match['text']}({name.removeprefix('docs/') or target}{anchor})"
        # A file of the repository that is no page: its path is what a reader of the site can use.
        return match["text"].strip("[]") if match["text"].strip("[]`") == name else f"{match['text'][1:-1]} (`{name}`)"

    return LINK.sub(mended, markdown)
