"""The planner: every destination element once, from a source that holds it, over random layouts of both sides."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Region, window
from rlframe.weight_sync.layout.memory import MemoryLayout, load_tensor, record
from rlframe.weight_sync.plan.copies import Copy
from rlframe.weight_sync.plan.piecewise import plan_piecewise
from rlframe.weight_sync.plan.planner import Kind, LinkSpeeds, Plan, make_plan
from rlframe.weight_sync.plan.tables import plan_tables
from rlframe.weight_sync.proof.shares import cover


@dataclass
class Cell:
    """A rectangle of a tensor, where it lies in a rank's flat parameter and how."""

    tensor: str
    rows: slice
    cols: slice
    transposed: bool


def layout_of(cells: list[Cell], tensors: dict[str, tuple[int, ...]]) -> tuple[MemoryLayout, dict[str, Tensor]]:
    """A rank whose one flat parameter holds the cells one after the other, and the parameter, full of NaN."""
    sizes = [(c.rows.stop - c.rows.start) * (c.cols.stop - c.cols.start) for c in cells]
    parameters = {"flat": torch.full((sum(sizes),), torch.nan)}

    def load(p: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
        for cell, part in zip(cells, p["flat"].split(sizes), strict=True):
            piece = checkpoint[cell.tensor][cell.rows, cell.cols]
            part = part.view(piece.shape[::-1]).t() if cell.transposed else part.view(piece.shape)
            part.copy_(piece)

    return record(load, parameters, tensors), parameters


def cuts(size: int) -> st.SearchStrategy[list[slice]]:
    """Ways to cut range(size) into consecutive parts."""
    points = st.sets(st.integers(1, size - 1), max_size=2) if size > 1 else st.just(set())
    return points.map(
        lambda inner: [slice(a, b) for a, b in zip([0, *sorted(inner)], [*sorted(inner), size], strict=True)]
    )


@st.composite
def sides(draw: st.DrawFn, tensors: dict[str, tuple[int, ...]], grids: int = 2) -> list[list[Cell]]:
    """Cells of 1 to 3 ranks that together hold every tensor: up to two grids, so that sources may overlap partly."""
    ranks: list[list[Cell]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for name, (rows, cols) in tensors.items():
        for replica in range(draw(st.integers(1, grids))):
            for row in draw(cuts(rows)):
                for col in draw(cuts(cols)):
                    rank = draw(st.integers(0, len(ranks) - 1))
                    cell = Cell(name, row, col, draw(st.booleans()))
                    if replica == 0 or all((c.tensor, c.rows, c.cols) != (name, row, col) for c in ranks[rank]):
                        ranks[rank].append(cell)
    return [cells for cells in ranks if cells]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_every_destination_element_is_written_once_from_the_right_source(data: st.DataObject) -> None:
    sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))
    tensors = {"a": data.draw(sizes), "b": data.draw(sizes)}
    values, first = {}, 0
    for name, shape in tensors.items():
        values[name] = torch.arange(first, first + shape[0] * shape[1], dtype=torch.float32).view(shape)
        first += values[name].numel()
    sources = [layout_of(cells, tensors) for cells in data.draw(sides(tensors))]
    destinations = [layout_of(cells, tensors) for cells in data.draw(sides(tensors))]
    for layout, parameters in sources:
        for name, value in values.items():
            load_tensor(layout, parameters, name, value)
    hosts = st.sampled_from(["one", "two"])
    plan = make_plan(
        [layout for layout, _ in sources],
        [layout for layout, _ in destinations],
        source_hosts=[data.draw(hosts) for _ in sources],
        destination_hosts=[data.draw(hosts) for _ in destinations],
    )
    elements = 0
    for rank, (layout, parameters) in enumerate(destinations):
        writes = {name: torch.zeros_like(value) for name, value in parameters.items()}
        for copy in plan.copies_for(rank):
            view(parameters, copy, write=True).copy_(view(sources[copy.source][1], copy, write=False))
            view(writes, copy, write=True).add_(1)
        assert all((count == 1).all() for count in writes.values())
        for name, boxes in layout.boxes.items():
            for box in boxes:
                expected = values[name][box.row : box.row + box.rows, box.col : box.col + box.cols]
                assert torch.equal(box.view(parameters), expected)
        elements += sum(value.numel() for value in parameters.values())
    assert plan.total_bytes == 4 * elements


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_plan_made_with_arrays_is_the_one_made_box_by_box(data: st.DataObject) -> None:
    sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))
    tensors = {"a": data.draw(sizes), "b": data.draw(sizes)}
    sources, destinations = (
        [layout_of(cells, tensors)[0] for cells in data.draw(sides(tensors, data.draw(st.integers(1, 2))))]
        for _ in range(2)
    )
    places = st.tuples(st.sampled_from(["one", "two"]), st.sampled_from(["cpu", "gpu 0", "gpu 1"]))
    here, there = ([data.draw(places) for _ in side] for side in (sources, destinations))
    plan = plan_tables(sources, destinations, here, there)
    if plan is not None:
        assert [list(copies) for copies in plan] == [
            list(copies) for copies in plan_piecewise(sources, destinations, here, there)
        ]


def view(parameters: dict[str, Tensor], copy: Copy, *, write: bool) -> Tensor:
    """One side of a copy."""
    place = copy.write if write else copy.read
    size, stride = (copy.rows, copy.cols), (place.row_stride, place.col_stride)
    return window(parameters[place.parameter], place.offset, size, stride)


def whole(tensors: dict[str, tuple[int, int]]) -> MemoryLayout:
    """A rank that holds every tensor in a parameter of its own name."""
    parameters = {name: torch.empty(shape) for name, shape in tensors.items()}
    return record(lambda p, c: [p[name].copy_(c[name]) for name in tensors], parameters, tensors)


def plan_of(
    sources: list[MemoryLayout], destinations: list[MemoryLayout], source_hosts: str, destination_hosts: str
) -> Plan:
    """make_plan with one letter per host."""
    return make_plan(sources, destinations, source_hosts=list(source_hosts), destination_hosts=list(destination_hosts))


def test_a_replica_on_the_same_host_is_read() -> None:
    side = whole({"t": (4, 3)})
    plan = plan_of([side, side], [side, side], "ab", "ba")
    assert [copies[0].source for copies in plan.copies] == [1, 0]


def test_without_one_the_least_loaded_replica_is_read() -> None:
    side = whole({"t": (4, 3), "u": (4, 3), "v": (2, 3)})
    plan = plan_of([side, side], [side], "ab", "c")
    # t from 0 and u from 1 (12 elements each); v from 0 again, the first of two equals.
    assert {copy.tensors: copy.source for copy in plan.copies_for(0)} == {("t",): 0, ("u",): 1, ("v",): 0}
    assert plan.link_bytes == {(0, 0): 72, (1, 0): 48}


def test_neighbours_on_both_sides_become_one_copy() -> None:
    # Gate over up in one parameter, on both sides: one copy instead of two.
    def load(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        p["fc1"][:2].copy_(c["gate"])
        p["fc1"][2:].copy_(c["up"])

    side = record(load, {"fc1": torch.empty(4, 3)}, {"gate": (2, 3), "up": (2, 3)})
    (copy,) = plan_of([side], [side], "a", "a").copies_for(0)
    assert (copy.tensors, copy.rows, copy.cols) == (("gate", "up"), 4, 3)


def test_describe_gives_copies_and_bytes_of_every_link() -> None:
    side = whole({"t": (1000, 250)})
    assert plan_of([side], [side], "a", "a").describe() == (
        "weight sync plan: 1 copies, 1.000 MB\n  source 0 -> destination 0 (memory): 1 copies, 1.000 MB"
    )


def on_devices(
    sources: list[MemoryLayout], destinations: list[MemoryLayout], source_devices: str, destination_devices: str
) -> Plan:
    """make_plan on one host with one letter per GPU."""
    return make_plan(
        sources,
        destinations,
        source_hosts=["a"] * len(sources),
        destination_hosts=["a"] * len(destinations),
        source_devices=list(source_devices),
        destination_devices=list(destination_devices),
    )


def test_a_replica_on_the_same_device_is_read_first() -> None:
    side = whole({"t": (4, 3)})
    plan = on_devices([side, side], [side, side], "xy", "yx")
    assert [copies[0].source for copies in plan.copies] == [1, 0]
    assert set(plan.link_kinds.values()) == {Kind.DEVICE}


def test_the_floor_is_the_busiest_rank_over_its_slowest_link() -> None:
    tensors = {"t": (4, 3)}
    top, _ = layout_of([Cell("t", slice(0, 2), slice(0, 3), False)], tensors)
    bottom, _ = layout_of([Cell("t", slice(2, 4), slice(0, 3), False)], tensors)
    side = whole(tensors)
    plan = on_devices([top, bottom], [side, side], "xy", "xy")
    # 6 elements of 4 bytes each from the own GPU and from the other, both at once.
    assert plan.kind_bytes == {Kind.DEVICE: 48, Kind.PEER: 48}
    assert plan.floor_s(LinkSpeeds(device=4.0, peer=2.0, network=1.0)) == pytest.approx(24 / 2e9)
    assert "at least" in plan.describe()
    assert plan_of([side], [side], "a", "a").floor_s() is None
    assert plan_of([side], [side], "a", "b").floor_s(LinkSpeeds(network=1.0)) == pytest.approx(48 / 1e9)


def test_an_element_without_a_source_is_named() -> None:
    tensors = {"t": (4, 3)}
    half, _ = layout_of([Cell("t", slice(0, 2), slice(0, 3), False)], tensors)
    with pytest.raises(WeightSyncFailed, match="no source rank holds rows 2..3, columns 0..2 of t, which parameter t"):
        plan_of([half], [whole(tensors)], "a", "a")


def test_shapes_must_agree() -> None:
    with pytest.raises(WeightSyncFailed, match=r"t has shape \[3, 4\] on destination rank 0 and \[4, 3\] elsewhere"):
        plan_of([whole({"t": (4, 3)})], [whole({"t": (3, 4)})], "a", "a")


def test_cover_recognises_replicas_and_refuses_gaps_and_overlaps() -> None:
    tensors = {"t": (4, 3)}
    top, _ = layout_of([Cell("t", slice(0, 2), slice(0, 3), False)], tensors)
    bottom, _ = layout_of([Cell("t", slice(2, 4), slice(0, 3), False)], tensors)
    middle, _ = layout_of([Cell("t", slice(1, 3), slice(0, 3), False)], tensors)
    assert cover({0: top, 1: bottom, 2: top}, side="the trainer") == {
        "t": {(Region(0, 2, 0, 3),): [0, 2], (Region(2, 2, 0, 3),): [1]}
    }
    with pytest.raises(WeightSyncFailed, match="engine 1 holds only 6 of the 12 elements of t"):
        cover({4: top}, side="engine 1")
    with pytest.raises(WeightSyncFailed, match="of t, which overlap"):
        cover({0: top, 1: middle, 2: bottom}, side="the trainer")
