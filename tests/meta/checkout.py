"""What the meta tests look at: the files of this checkout."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def files() -> list[Path]:
    """Every file that is tracked or would be: what git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def python_files() -> list[Path]:
    """The Python files among them."""
    return [path for path in files() if path.suffix == ".py"]


def functions(path: Path) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Each function of a file with its number of lines, decorators left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node, node.end_lineno - node.lineno + 1


def code_block(marker: str, *, page: Path = README) -> str:
    """The content of the page's fenced block that follows the line `<!-- marker -->`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"<!-- {marker} -->") + 2
    return "\n".join(lines[start : lines.index("```", start)])
