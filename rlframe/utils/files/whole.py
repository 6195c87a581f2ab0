"""Files of a run: written whole or not at all. Errors of the system become sentences."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlframe.utils.errors import OutputError

PARTIAL = ".partial"
"""Ends the name of what is not whole yet."""
AGAIN = "then start the same command again; a run resumes from its last complete checkpoint"
ADVICE = {
    errno.ENOSPC: f"the disk is full: free some space, {AGAIN}",
    errno.EDQUOT: f"the quota is used up: free some space or have it raised, {AGAIN}",
    errno.EFBIG: f"files may not grow that large here: raise the limit (ulimit -f), {AGAIN}",
    errno.EROFS: "the file system is read-only: mount it writable, or choose another folder (of a run, output=)",
    errno.EACCES: "this user may not write there: change the permissions, or choose another folder (of a run, output=)",
    errno.EPERM: "this user may not write there: change the permissions, or choose another folder (of a run, output=)",
    errno.ENAMETOOLONG: "the name is too long for this file system: choose a shorter one (of a run, output=)",
    errno.ENOENT: "its folder does not exist, or was removed or moved meanwhile: choose another (of a run, output=)",
    errno.EISDIR: "a folder has its name: choose another name of a file",
    errno.ENOTDIR: "something in this path is a file: choose another folder (of a run, output=)",
}
"""Advice to the user, by the system's error number."""
OTHERWISE = f"check the disk or the network to it, {AGAIN}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Runs the block, which writes `path` or files below it.

    Raises:
        OutputError: the system refused. The message names the file, the system's error and what to do.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(not_written(path, error)) from error


def not_written(path: Path, error: OSError) -> str:
    """Returns the sentence for `error`, raised while `path` was written."""
    name = str(error.filename or path)
    if len(name) > 200:
        name = f"{name[:100]}...{name[-50:]} ({len(name)} characters)"
    said = error.strerror or str(error)
    return f"{name} cannot be written: {said}; {ADVICE.get(error.errno or 0, OTHERWISE)}"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that, after a crash at any moment, is complete, unchanged, or absent.

    Raises:
        OutputError: see `writing`. The file is unchanged.
    """
    with whole_file(path) as aside:
        aside.write_bytes(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives the block a place aside to write a file to, which becomes `path` at its end: whole, and on the disk.

    Raises:
        OutputError: see `writing`. The file is as it was before.
    """
    aside = path.with_name(f".{path.name}{PARTIAL}")
    with writing(path):
        try:
            yield aside
            put(aside, path)
        finally:
            # It is not there any more once it has its name.
            with contextlib.suppress(OSError):
                aside.unlink()


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Gives the block an empty folder aside to write to, which becomes `path` at its end, in place of one that is
    there: whole, and on the disk. What an error leaves unfinished is removed.

    Raises:
        OutputError: the folder cannot be made, or not be named; what the block raises is its own.
    """
    aside = path.with_name(f".{path.name}{PARTIAL}")
    shutil.rmtree(aside, ignore_errors=True)
    with writing(aside):
        aside.mkdir(parents=True)
    try:
        yield aside
        with writing(path):
            shutil.rmtree(path, ignore_errors=True)
            put(aside, path)
    finally:
        # It is not there any more once it has its name.
        shutil.rmtree(aside, ignore_errors=True)


def put(aside: Path, path: Path) -> None:
    """Gives a file, or a folder, that was written aside the name `path`, once all of it is on the disk.

    Raises:
        OSError: it cannot be; nothing has this name that had not before.
    """
    for each in (aside, *aside.rglob("*")) if aside.is_dir() else (aside,):
        sync(each)
    aside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
