"""Sealed files: JSON in which a change of any byte is seen.

`{"sha256": "...",` stands on the first line, and is the digest of all that follows it. Against damage and mistakes, not
against someone who makes the digest anew.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from rlframe.utils.errors import CheckpointError
from rlframe.utils.files import write_whole


def write_sealed(path: Path, content: Any) -> None:
    """Writes `content`, plain JSON values, as a file that is there whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    write_whole(path, to_sealed(content))


def to_sealed(content: Any) -> bytes:
    """Returns the bytes of the file that holds `content`."""
    rest = b'"content": ' + json.dumps(content, separators=(",", ":")).encode() + b"}\n"
    return _head(rest) + rest


def read_sealed(path: Path) -> Any:
    """Returns the content of a sealed file.

    Raises:
        CheckpointError: it is not there, cannot be read, or is not as it was written.
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
