"""Flight records: the collectives that a rank has entered, from torch's own recorder of gloo and NCCL.

torch keeps the last collectives of every process group in a ring (TORCH_FR_BUFFER_SIZE of them) at no measurable cost.
Each rank writes its ring to a file on request. The files of all ranks together show which ranks have entered a
collective and which have not.
"""

import json
import pathlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RING = {"TORCH_FR_BUFFER_SIZE": "256", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""Variables that a rank's process starts with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """A collective that a rank has entered and not left."""

    name: str
    """Name of the collective, such as gloo:all_reduce."""
    group: str
    """torch's name of the process group."""
    ranks: tuple[int, ...]
    """Ranks of the process group."""
    number: int
    """Number of the collective in its group, which all ranks count alike."""

    def __str__(self) -> str:
        return f"{self.name} number {self.number} of ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """The contents of a rank's record."""

    inside: tuple[Entered, ...]
    """Collectives entered and not left, oldest first."""
    reached: Mapping[tuple[str, tuple[int, ...]], int]
    """Greatest number entered, by group and its ranks."""


def write_flight(path: pathlib.Path) -> None:
    """Writes the record of this process as JSON: a list with one entry per recorder that torch was built with."""
    # A process that has not imported torch is in no collective, and must not import it now.
    recorders = sys.modules.get("torch._C._distributed_c10d")
    records: list[Any] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if dump := getattr(recorders, name, None):
            records.append(json.loads(dump()))
    records.append({"pg_config": own_groups()})
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(records), encoding="utf-8")
    partial.replace(path)


def own_groups() -> dict[str, dict[str, str]]:
    """Returns the ranks of every process group of this process, in the format of a record. Gloo's own record (torch
    2.13) has only those of one group."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return {}
    world = module._world
    return {
        name: {"ranks": json.dumps(list(world.pg_group_ranks.get(group, {})))}
        for group, name in dict(world.pg_names).items()
    }


def read_flight(path: pathlib.Path) -> Flight:
    """Returns the contents of the record in `path`, or nothing if there is none."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Flight(inside=(), reached={})
    inside: dict[tuple[str, int], Entered] = {}
    reached: dict[tuple[str, tuple[int, ...]], int] = {}
    groups = {
        key: ranks
        for record in records
        for key, config in record.get("pg_config", {}).items()
        if (ranks := ranks_of(config))
    }
    for record in records:
        for entry in sorted(record.get("entries", []), key=lambda entry: entry["record_id"]):
            name, ranks = group_of(entry, groups)
            number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
            if not entry["is_p2p"]:
                reached[name, ranks] = max(number, reached.get((name, ranks), 0))
            if entry["retired"] or entry["state"] == "completed":
                continue
            found = Entered(name=entry["profiling_name"], group=name, ranks=ranks, number=number)
            inside.setdefault((name, number), found)
    return Flight(inside=tuple(inside.values()), reached=reached)


def group_of(entry: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
    """Returns the name and the ranks of the process group of a recorded collective."""
    name = entry["process_group"][0]
    # The default group of gloo has no name in the list of groups.
    return name, groups.get(name, groups.get("", ()))


def ranks_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ranks of a process group, which the record has as the text of a list."""
    return tuple(json.loads(config.get("ranks") or "[]"))


def absent(flights: Mapping[int, Flight], rank: int) -> tuple[Entered, list[int]] | None:
    """Returns the collective that `rank` is in, and the ranks of its group that have not entered it.

    Args:
        flights: records by rank. A rank without a record, because it is stopped or dead, counts as not arrived.

    Returns:
        None if the rank is in no collective, or all ranks have entered it.
    """
    for entered in flights[rank].inside:
        key = (entered.group, entered.ranks)
        empty = Flight(inside=(), reached={})
        missing = [peer for peer in entered.ranks if flights.get(peer, empty).reached.get(key, 0) < entered.number]
        if missing:
            return entered, missing
    return None
