"""Random layouts on both sides through every way the weights can travel: what arrives is what was sent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframe.weight_sync.channel import WeightSource, WeightSync
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout.memory import load_tensor
from rlframe.weight_sync.plan.copies import Copies, Copy, Place
from rlframe.weight_sync.plan.packing import ALIGNMENT, capacity_of, cut, message_bytes
from tests.unit.weight_sync.groups import LocalDestinations, LocalSources, destination
from tests.unit.weight_sync.test_plan import Cell, cuts, layout_of


@st.composite
def partition(draw: st.DrawFn, tensors: dict[str, tuple[int, ...]]) -> list[list[Cell]]:
    """Cells of 1 to 3 ranks that together hold every tensor once."""
    ranks: list[list[Cell]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for name, (rows, cols) in tensors.items():
        columns = draw(cuts(cols))
        for row in draw(cuts(rows)):
            for col in columns:
                cell = Cell(name, row, col, draw(st.booleans()))
                ranks[draw(st.integers(0, len(ranks) - 1))].append(cell)
    return [cells for cells in ranks if cells]


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_layouts_arrive_as_sent(transport: str, data: st.DataObject) -> None:
    # Up to 64 by 40 elements of 4 bytes: larger than a message of 1024 bytes over up to three ranks.
    tensors = {name: (data.draw(st.integers(1, 64)), data.draw(st.integers(1, 40))) for name in "ab"}
    sources = [layout_of(cells, tensors) for cells in data.draw(partition(tensors))]
    engine = [layout_of(cells, tensors) for cells in data.draw(partition(tensors))]
    for layout, parameters in [*sources, *engine]:
        for name, shape in tensors.items():
            load_tensor(layout, parameters, name, torch.zeros(shape))
    ends = LocalSources([WeightSource(*pair) for pair in sources])
    sync = WeightSync(
        ends,
        LocalDestinations([[destination(*pair) for pair in engine]]),
        WeightSyncConfig(transport=transport, chunk_bytes=1024, timeout_s=60),
    )
    sync.connect()
    sync.calibrate(version=0)
    values = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in tensors.items()}
    for layout, parameters in sources:
        for name, value in values.items():
            load_tensor(layout, parameters, name, value)
    sync.publish(version=1)
    for layout, parameters in engine:
        for name, boxes in layout.boxes.items():
            for box in boxes:
                expected = values[name][box.row : box.row + box.rows, box.col : box.col + box.cols]
                assert torch.equal(box.view(parameters), expected)
    sync.close()


@pytest.mark.parametrize("num_peers", [1, 64, 65, 1000])
def test_the_least_buffers_are_enough_for_any_number_of_peers(num_peers: int) -> None:
    place = Place("p", 0, 64, 1)
    copies = Copies.of([(0, Copy(("t",), 0, 8, 64, place, place))])
    messages = cut(copies, "read", {"t": torch.float32}, capacity_of(1024, num_peers))
    assert sum(map(message_bytes, messages)) == 8 * 64 * 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40), st.booleans()), min_size=1, max_size=6),
    capacity=st.integers(1, 40).map(lambda units: units * ALIGNMENT),
)
def test_both_ends_cut_messages_alike_and_every_element_is_in_one_piece(
    sizes: list[tuple[int, int, bool]], capacity: int
) -> None:
    copies, read, write = [], 0, 0
    for index, (rows, cols, transposed) in enumerate(sizes):
        strides = (1, rows) if transposed else (cols, 1)
        copies.append(
            (0, Copy((str(index % 2),), 0, rows, cols, Place("p", read, cols, 1), Place("q", write, *strides)))
        )
        read, write = read + rows * cols, write + rows * cols
    dtypes = {"0": torch.bfloat16, "1": torch.float32}
    sent, received = (cut(Copies.of(copies), side, dtypes, capacity) for side in ("read", "write"))
    where = [
        [[(piece.start, piece.num_bytes, piece.dtype) for piece in message] for message in side]
        for side in (sent, received)
    ]
    assert where[0] == where[1]
    assert all(message_bytes(message) <= capacity for message in sent)
    for side, size in ((sent, read), (received, write)):
        count = torch.zeros(size)
        for message in side:
            end = 0
            for piece in message:
                assert piece.start >= end and piece.start % ALIGNMENT == 0
                end = piece.start + piece.num_bytes
                count.as_strided((piece.rows, piece.cols), (piece.row_stride, piece.col_stride), piece.offset).add_(1)
        assert (count == 1).all()
