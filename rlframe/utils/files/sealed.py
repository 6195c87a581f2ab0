"""Sealed files: JSON in which the change of any byte is detected.

`{"sha256": "...",` is the first line, and holds the digest of everything after it. It protects against damage and
mistakes, not against someone who recomputes the digest.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from rlframe.utils.errors import CheckpointError
from rlframe.utils.files.whole import write_whole


def write_sealed(path: Path, content: Any) -> None:
    """Writes `content`, plain JSON values, as a file that is complete or absent.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(path, to_sealed(content))


def to_sealed(content: Any) -> bytes:
    """Returns the bytes of the file that holds `content`."""
    rest = b'"content": ' + json.dumps(content, separators=(",", ":")).encode() + b"}\n"
    return _head(rest) + rest


def read_sealed(path: Path) -> Any:
    """Returns the content of a sealed file.

    Raises:
        CheckpointError: the file is missing, cannot be read, or has changed since it was written.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    head, _, rest = content.partition(b"\n")
    if not rest or head + b"\n" != _head(rest):
        raise CheckpointError(f"{path} is damaged: its content does not agree with the SHA-256 on its first line")
    return json.loads(b"{" + rest)["content"]


def _head(rest: bytes) -> bytes:
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode()
