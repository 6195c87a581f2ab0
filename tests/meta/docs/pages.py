"""The pages of the documentation, and the blocks of code in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.meta.checkout import ROOT

PAGES = [ROOT / "README.md", ROOT / "rlframe" / "models" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMENT = re.compile(r"<!-- (?P<text>.*) -->")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    comment: str
    """Text of the HTML comment above it, such as `needs: a GPU`. Empty if there is none."""
    text: str

    @property
    def place(self) -> str:
        """Its page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs(self) -> bool:
        """Whether it says that this machine does not have what it needs."""
        return self.comment.startswith("needs:")

    @property
    def commands(self) -> list[str]:
        """Its shell commands: lines joined where they end with a backslash, lists of commands taken apart."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [part.strip() for line in lines for part in line.split(" && ") if part.strip()]


def blocks(page: Path) -> Iterator[Block]:
    """Yields the fenced blocks of a page. What is inside a fence of four signs is one block."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = re.match(r"(`{3,})(\w*)$", lines[number])
        if fence:
            end = lines.index(fence[1], number + 1)
            above = COMMENT.fullmatch(lines[number - 1]) if number else None
            text = "\n".join(lines[number + 1 : end])
            comment = above["text"] if above else ""
            yield Block(page=page, line=number + 1, language=fence[2], comment=comment, text=text)
            number = end
        number += 1


def all_blocks(language: str) -> list[Block]:
    """Returns the blocks of all pages in a language."""
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def files_of(page: Path) -> dict[str, str]:
    """Returns the files that a page shows, by name: blocks under `<!-- file: NAME -->`."""
    return {
        block.comment.removeprefix("file: "): block.text + "\n"
        for block in blocks(page)
        if block.comment.startswith("file: ")
    }


def words(command: str) -> list[str]:
    """Returns the words of a shell command, without its comment."""
    return shlex.split(command, comments=True)


def records(example: str, *, count: int) -> str:
    """Returns `count` JSON lines like the ones of an example, with sums of their own."""
    first = example.splitlines()[0]
    assert '"12+13="' in first and '"25"' in first
    found = []
    for index in range(count):
        left, right = 10 + index % 80, 1 + index // 80
        found.append(first.replace("12+13=", f"{left}+{right}=").replace('"25"', f'"{left + right}"'))
    return "\n".join(found) + "\n"
