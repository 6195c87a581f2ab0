"""What lives outside the package: found, described, and taken to processes that cannot read the file."""

import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from rlframe.utils import outside
from rlframe.utils.errors import ConfigError

Settings = TypeVar("Settings")


@dataclass
class Mine:
    name: str = "mine"


class Base(Generic[Settings]):
    def __init__(self, config: Settings):
        self.config = config


class ByBase(Base[Mine]):
    pass


class ByAnnotation:
    def __init__(self, config: Mine):
        self.config = config


class Untold:
    def __init__(self, config: Any):
        self.config = config


def test_settings_are_those_of_the_annotation_or_of_the_generic_base() -> None:
    assert outside.settings_of(ByAnnotation, key="k") is Mine
    assert outside.settings_of(ByBase, key="k") is Mine
    assert outside.settings_of(type("Child", (ByBase,), {}), key="k") is Mine
    with pytest.raises(ConfigError, match="k must name a class with __init__.*got Untold"):
        outside.settings_of(Untold, key="k")


def test_a_file_is_run_once_and_an_object_of_it_reaches_a_process_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from dataclasses import dataclass\n\n@dataclass\nclass Point:\n    x: int\n")
    target = f"{file}:Point"
    point = outside.load(target, key="k")
    assert outside.load(target, key="k") is point
    sent = pickle.dumps(({str(file): outside.SOURCES[str(file)]}, pickle.dumps(point(3)), target))
    # As on another node.
    file.unlink()
    program = (
        "import pickle, sys\n"
        "from rlframe.utils import outside\n"
        "sources, point, target = pickle.load(sys.stdin.buffer)\n"
        "outside.receive(sources)\n"
        "assert type(pickle.loads(point)) is outside.load(target, key='k')\n"
        "print(pickle.loads(point))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, check=True)
    assert done.stdout == b"Point(x=3)\n"


def test_a_file_that_cannot_be_run_is_refused_with_its_error_each_time(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="k: '.*broken.py:X' cannot be imported: SystemExit: 3"):
            outside.load(f"{tmp_path / 'broken.py'}:X", key="k")


def test_the_same_relative_path_is_another_file_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"VALUE = {name!r}")
    monkeypatch.chdir(tmp_path / "a")
    assert outside.load("mine.py:VALUE", key="k") == "a"
    (tmp_path / "a/mine.py").write_text("VALUE = 'edited'")
    for _ in range(2):
        assert outside.load("mine.py:VALUE", key="k") == "a", "of one process"
    assert [record.message.split(" has changed")[0] for record in caplog.records] == [str(tmp_path / "a/mine.py")]
    monkeypatch.chdir(tmp_path / "b")
    assert outside.load("mine.py:VALUE", key="k") == "b"
    # A worker has what its driver has sent, whatever lies at the same path beside it.
    monkeypatch.setattr(outside, "RECEIVED", set())
    outside.receive({"mine.py": (str(tmp_path / "elsewhere/mine.py"), "VALUE = 'sent'")})
    assert outside.load("mine.py:VALUE", key="k") == "sent"
    del outside.SOURCES["mine.py"]
