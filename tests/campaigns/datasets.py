"""Data sets with hostile contents: every field of every shape, every format. `python -m tests.campaigns.datasets`."""

import argparse
import copy
import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.campaigns.attempts import attempt, command_line, composed, with_values
from tests.campaigns.trials import Trial, write

MISSING = object()
DEEP = 150_000
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts": ("grpo_qwen3_moe", {"prompt": "1+1=", "answer": "2"}),
    "verl": (
        "grpo_qwen3_moe",
        {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}},
    ),
    "conversations": (
        "sft_qwen3_moe_tiny",
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2", "weight": 1.0}]},
    ),
    "alpaca": (
        "sft_qwen3_moe_tiny",
        {"instruction": "1+1=", "input": "x", "output": "2", "system": "s", "history": [["a", "b"]]},
    ),
    "pairs": ("dpo_qwen3_moe_tiny", {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 1.0}),
    "rankings": ("dpo_qwen3_moe_tiny", {"prompt": "1+1=", "responses": ["2", "3"], "scores": [1.0, 0.0]}),
    "unpaired": ("kto_qwen3_moe_tiny", {"prompt": "1+1=", "completion": "2", "label": True}),
    "texts": ("pretrain_qwen3_moe_tiny", {"text": "1+1=2"}),
    "labelled": ("classification_qwen3_moe_tiny", {"text": "1+1=2", "label": "plain"}),
    "reranked": ("reranker_qwen3_moe_tiny", {"query": "1+1=", "documents": ["2", "3"], "labels": [1, 0]}),
    "contrasted": ("embedding_qwen3_moe_tiny", {"query": "1+1=", "positive": "2", "negative": "3"}),
}
"""By shape: who trains on it, and a record."""
VALUES: dict[str, Any] = {
    "null": None, "missing": MISSING, "int": 5, "float": -1.5, "true": True, "empty": "", "space": " \n",
    "list": [], "object": {}, "nulls": [None], "lists": [[[]]], "nested": {"a": {"b": 1}},
    "surrogate": "a\ud800b", "zero byte": "a\x00b", "escapes": "\x1b[31m\u202eabc", "huge int": 10**400,
    "huge float": 1e300, "special": "<|end|><|assistant|>", "deep": "DEEP", "long": "x" * 20_000,
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a record there is something to put something else in place of."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def put(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy of the record with `value` at `path`."""
    changed = copy.deepcopy(record)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    if value is MISSING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return changed


def good(shape: str, count: int) -> list[dict[str, Any]]:
    """Sound records, no two alike."""
    record = SHAPES[shape][1]
    rows = [json.loads(json.dumps(record).replace("1+1=", f"{index}+1=")) for index in range(count)]
    if shape == "labelled":
        rows[0]["label"] = "carry"
    return rows


def line(record: dict[str, Any]) -> str:
    """The record as JSON; "DEEP" as a list of many levels."""
    return json.dumps(record).replace('"DEEP"', "[" * DEEP + "]" * DEEP)


class Campaign:
    """Tries data sets in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        configs = {config for config, _ in SHAPES.values()}
        self.values = {config: composed(config, *self.overrides(config)) for config in configs}
        self.count = 0

    @staticmethod
    def overrides(config: str) -> list[str]:
        """What makes the jobs small, and keeps tokenised items apart."""
        return [] if config.startswith("grpo") else ["data.cache_folder=null"]

    def of_fields(self, stride: int = 1) -> Iterator[Trial]:
        """Each value in each place of each shape, on the fourth line."""
        cases = [
            (shape, path, name)
            for shape, (_, record) in SHAPES.items()
            for path in places(record)
            for name in VALUES
            if not (VALUES[name] is MISSING and isinstance(path[-1], int))
        ]
        for shape, path, name in cases[::stride]:
            hostile = put(SHAPES[shape][1], path, VALUES[name])
            file = self.file("x.jsonl")
            file.write_text("\n".join([*map(line, good(shape, 3)), line(hostile)]))
            yield self.tried(shape, f"{'.'.join(map(str, path))} {name}", file, f"{file}:4", records=4)

    def tried(self, shape: str, name: str, path: Path | str, *names: str, records: int) -> Trial:
        """The attempt to train on `path`."""

        def lost(stream: Any) -> str:
            found = len(stream) + sum(stream.dropped.values())
            return "" if shape == "texts" or found >= records else f"{found} of {records} records are accounted for"

        values = with_values(self.values[SHAPES[shape][0]], data__path=str(path))
        return attempt(f"{shape}: {name}", values, names=names, used=lost)

    def file(self, name: str) -> Path:
        """A place for a file in a folder of its own."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        return folder / name

    def of_files(self, shapes: tuple[str, ...] = tuple(SHAPES)) -> Iterator[Trial]:
        """Each damage of a whole file, for each shape."""
        for shape in shapes:
            for name, make in FILES.items():
                path = make(self, shape)
                shown = str(path)[:60].replace("\x00", "")
                yield self.tried(shape, name, path, shown, records=0)

    def of_command_lines(self, stride: int = 1) -> Iterator[Trial]:
        """Some through the real door."""
        for shape, name in list(zip(SHAPES, COMMAND_LINES, strict=False))[::stride]:
            path = FILES[name](self, shape)
            folder = self.folder / f"cwd {self.count}"
            folder.mkdir()
            arguments = ["--config-name", SHAPES[shape][0], f"data.path='{path}'", "output=run"]
            yield command_line(f"{shape}: {name}", folder, *arguments, names=(str(path),))


def jsonl(change: Callable[[bytes], bytes]) -> Callable[[Campaign, str], Path]:
    """Makes a .jsonl file of sound records with its bytes changed."""

    def make(campaign: Campaign, shape: str) -> Path:
        file = campaign.file("x.jsonl")
        file.write_bytes(change("\n".join(map(line, good(shape, 3))).encode()))
        return file

    return make


def special(place: Callable[[Path], Any], name: str = "x.jsonl") -> Callable[[Campaign, str], Path]:
    """Makes a folder in which `name` is something strange."""

    def make(campaign: Campaign, shape: str) -> Path:
        file = campaign.file(name)
        place(file)
        return file

    return make


def parquet(change: Callable[[Path], None], columns: Callable[[list[dict]], Any] = pyarrow.Table.from_pylist) -> Any:
    """Makes a Parquet file of sound records, and changes it."""

    def make(campaign: Campaign, shape: str) -> Path:
        file = campaign.file("x.parquet")
        pyarrow.parquet.write_table(columns(good(shape, 3)), file)
        change(file)
        return file

    return make


def loops(file: Path) -> None:
    """Two links to the folder itself, beside a sound file."""
    for name in ("a.jsonl", "b.jsonl"):
        (file.parent / name).symlink_to(file.parent)


def folder_of(make: Callable[[Campaign, str], Path]) -> Callable[[Campaign, str], Path]:
    """The folder of what `make` makes."""
    return lambda campaign, shape: make(campaign, shape).parent


def cut(file: Path) -> None:
    """Removes the last bytes."""
    file.write_bytes(file.read_bytes()[:-20])


def spoil(file: Path) -> None:
    """Changes a byte in the middle of the data."""
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(bytes(content))


FILES: dict[str, Callable[[Campaign, str], Any]] = {
    "sound": jsonl(lambda content: content),
    "byte order mark": jsonl(lambda content: b"\xef\xbb\xbf" + content),
    "CRLF": jsonl(lambda content: content.replace(b"\n", b"\r\n")),
    "blank lines": jsonl(lambda content: b"\n\n" + content + b"\n \n"),
    "the same thrice": jsonl(lambda content: b"\n".join([content, content, content])),
    "empty": jsonl(lambda content: b""),
    "only blank lines": jsonl(lambda content: b"\n \n\t\n"),
    "UTF-16": jsonl(lambda content: content.decode().encode("utf-16")),
    "Latin-1": jsonl(lambda content: content.replace(b"1+1", "\u00e9".encode("latin-1"))),
    "compressed": jsonl(gzip.compress),
    "cut": jsonl(lambda content: content[:-5]),
    "NaN": jsonl(lambda content: content[:-1] + b', "more": NaN}'),
    "1e999": jsonl(lambda content: content[:-1] + b', "more": 1e999}'),
    "a key twice": jsonl(lambda content: content[:-1] + b', "k": 1, "k": 2}'),
    "deep": jsonl(lambda content: content[:-1] + b', "more": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "a few hundred levels": jsonl(lambda content: content[:-1] + b', "more": ' + b"[" * 400 + b"]" * 400 + b"}"),
    "60 MB": jsonl(lambda content: content[:-1] + b', "more": "' + b"x" * 60_000_000 + b'"}'),
    "zeros": jsonl(lambda content: bytes(1000)),
    "a list": jsonl(lambda content: b"[" + content.replace(b"\n", b",") + b"]"),
    "numbers": jsonl(lambda content: b"1\n2\n3"),
    "5,000 fields": jsonl(
        lambda content: content + b"\n" + json.dumps({f"field {n}": n for n in range(5000)}).encode()
    ),
    "another shape": jsonl(lambda content: content + b'\n{"unknown": 1}'),
    "two ids": jsonl(lambda content: b"\n".join(b'{"id": 7, ' + one[1:] for one in content.split(b"\n"))),
    "id of half a pair": jsonl(lambda content: b'{"id": "\\ud800", ' + content[1:]),
    "a folder": special(Path.mkdir),
    "a pipe": special(os.mkfifo),
    "a pipe in a folder": folder_of(special(os.mkfifo)),
    "a link to nowhere": special(lambda file: file.symlink_to("gone")),
    "a link to itself": special(lambda file: file.symlink_to(file)),
    "links to the folder": folder_of(special(loops)),
    "nothing": special(lambda file: None),
    "no ending": special(lambda file: file.write_text("{}"), "x"),
    "csv": special(lambda file: file.write_text("a,b\n1,2\n"), "x.csv"),
    "a device": lambda campaign, shape: "/dev/zero",
    "memory": lambda campaign, shape: "/proc/self/mem",
    "nobody's home": lambda campaign, shape: "~nobody-at-all/x.jsonl",
    "JSON": special(lambda file: file.write_text("{"), "x.json"),
    "JSON object": special(lambda file: file.write_text("{}"), "x.json"),
    "JSON of 60 MB": special(lambda file: file.write_text(json.dumps([{"prompt": "x" * 60_000_000}])), "x.json"),
    "Parquet": parquet(lambda file: None),
    "Parquet cut": parquet(cut),
    "Parquet spoiled": parquet(spoil),
    "Parquet that is none": special(lambda file: file.write_text("PAR1"), "x.parquet"),
    "Parquet of nulls": parquet(
        lambda file: None, lambda rows: pyarrow.table({name: pyarrow.nulls(3) for name in rows[0]})
    ),
    "Parquet of bytes": parquet(
        lambda file: None, lambda rows: pyarrow.table({name: [b"\xff"] * 3 for name in rows[0]})
    ),
    "Parquet without rows": parquet(lambda file: None, lambda rows: pyarrow.Table.from_pylist(rows).slice(0, 0)),
    "Parquet with a column twice": parquet(
        lambda file: None,
        lambda rows: pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=[next(iter(rows[0]))] * 2),
    ),
    "text that is no UTF-8": special(lambda file: file.write_bytes(b"\xff\xfe\x00"), "x.txt"),
    "text of 60 MB": special(lambda file: file.write_bytes(b"x" * 60_000_000), "x.txt"),
}
"""By name; each gives the path to train on."""
COMMAND_LINES = ("60 MB", "deep", "id of half a pair", "Latin-1", "a pipe", "Parquet cut", "text of 60 MB", "empty")


def main() -> None:
    """Tries all, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stride", type=int, default=1, help="try every n-th only")
    stride = parser.parse_args().stride
    folder = Path(tempfile.mkdtemp(prefix="datasets-"))
    campaign = Campaign(folder)
    trials = [*campaign.of_fields(stride), *campaign.of_files(tuple(SHAPES)[::stride])]
    trials += [*campaign.of_command_lines(stride)]
    print(write("datasets", trials, command=f"python -m tests.campaigns.datasets --stride {stride}").row())
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
