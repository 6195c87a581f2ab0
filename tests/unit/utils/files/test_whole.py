"""Files that are there whole or not at all, and what the system says against them as a sentence."""

import errno
import os
from pathlib import Path

import pytest

from rlframe.utils.errors import CheckpointError, OutputError
from rlframe.utils.files import whole
from rlframe.utils.files.sealed import read_sealed, to_sealed, write_sealed
from rlframe.utils.files.whole import whole_file, whole_folder, write_whole, writing


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_whole(file, b"old")
    write_whole(file, b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.json", b"new")]


def test_a_crash_on_the_way_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_whole(file, b"old")

    def die(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(whole.os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old"


def test_a_file_that_others_write_is_whole_or_as_it_was(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a") as aside:
        aside.write_text("old")
        assert not (tmp_path / "a").exists()
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "a") as aside:
        aside.write_text("new")
        raise ZeroDivisionError
    with pytest.raises(OutputError, match=r"a.partial cannot be written: No such file"), whole_file(tmp_path / "a"):
        pass
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_a_folder_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, synced = tmp_path / "a", set()
    real = whole.sync
    monkeypatch.setattr(whole, "sync", lambda path: (synced.add(path.name), real(path)))
    (tmp_path / ".a.partial").mkdir()
    (tmp_path / ".a.partial" / "of a crash").touch()
    for content in ("old", "new"):
        with whole_folder(folder) as aside:
            (aside / "inner").mkdir()
            (aside / "inner" / content).touch()
    with pytest.raises(ZeroDivisionError), whole_folder(folder) as aside:
        (aside / "half").touch()
        raise ZeroDivisionError
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "a",
        "a/inner",
        "a/inner/new",
    ]
    assert {".a.partial", "inner", "old", "new", tmp_path.name} <= synced, "all of it is on the disk"
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written: Not a directory"), whole_folder(tmp_path / "file" / "a"):
        pass


def test_what_the_system_says_becomes_a_sentence(tmp_path: Path) -> None:
    (tmp_path / ".full.partial").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="full cannot be written: No space left on device; the disk is full: free"):
        write_whole(tmp_path / "full", b"x")
    assert not (tmp_path / ".full.partial").is_symlink(), "what was half written is gone"
    with pytest.raises(OutputError, match="No such file or directory; its folder does not exist, or was removed"):
        write_whole(tmp_path / "gone" / "file", b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="Is a directory; a folder has its name"):
        write_whole(tmp_path / "folder", b"x")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="Not a directory; something in this path is a file"):
        write_whole(tmp_path / "file" / "file", b"x")
    with pytest.raises(OutputError, match=r"xxx\.\.\.x.* \(5\d\d\d characters\) cannot be written: File name too long"):
        write_whole(tmp_path / ("x" * 5000), b"x")
    for number in (errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE):
        with pytest.raises(OutputError, match=f"a cannot be written: {os.strerror(number)}; "), writing(Path("a")):
            raise OSError(number, os.strerror(number))


def test_a_change_of_any_byte_of_a_sealed_file_is_seen(tmp_path: Path) -> None:
    file, content = tmp_path / "sealed.json", {"step": 7, "files": {"a": [1, 2]}, "none": None}
    write_sealed(file, content)
    assert read_sealed(file) == content
    written = file.read_bytes()
    for position in range(len(written)):
        for changed in (
            written[:position],
            written[:position] + bytes([written[position] ^ 1]) + written[position + 1 :],
            written[:position] + written[position + 1 :],
            written[:position] + b" " + written[position:],
        ):
            file.write_bytes(changed)
            with pytest.raises(CheckpointError, match="sealed.json is damaged"):
                read_sealed(file)
    for other in (b"[]", b"{}", b"\n", b"null\n", to_sealed(content) + b"\n"):
        file.write_bytes(other)
        with pytest.raises(CheckpointError, match="is damaged"):
            read_sealed(file)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_sealed(file)
