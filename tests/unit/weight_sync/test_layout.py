"""Recording a loader: which boxes come out, and what is refused."""

import pickle
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Box, Padding, Region
from rlframe.weight_sync.layout.memory import clear_padding, export_tensor, load_tensor, record, record_loader


def test_a_plain_copy_is_one_box() -> None:
    layout = record(lambda p, c: p["p"].copy_(c["t"]), {"p": torch.empty(4, 3)}, {"t": (4, 3)})
    assert layout.boxes == {"t": (Box("t", 0, 4, 0, 3, "p", 0, 3, 1),)}


def test_a_column_slice_keeps_its_place_in_the_tensor() -> None:
    layout = record(lambda p, c: p["p"].copy_(c["t"].chunk(2, dim=1)[1]), {"p": torch.empty(4, 3)}, {"t": (4, 6)})
    assert layout.boxes["t"] == (Box("t", 0, 4, 3, 3, "p", 0, 3, 1),)


def test_interleaved_groups_become_one_box_each() -> None:
    # p is [group, 2 query rows + 1 key row, 5]: query rows 0, 1 | key 0 | query rows 2, 3 | key 1.
    def load(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        groups = p["p"].view(2, 3, 5)
        groups[:, :2].copy_(c["q"].view(2, 2, 5))
        groups[:, 2].copy_(c["k"])

    layout = record(load, {"p": torch.empty(6, 5)}, {"q": (4, 5), "k": (2, 5)})
    assert layout.boxes["q"] == (Box("q", 0, 2, 0, 5, "p", 0, 5, 1), Box("q", 2, 2, 0, 5, "p", 15, 5, 1))
    # Key rows lie 15 elements apart: one box with that stride.
    assert layout.boxes["k"] == (Box("k", 0, 2, 0, 5, "p", 10, 15, 1),)


def test_vectors_are_one_row_and_higher_dimensions_are_flattened() -> None:
    def load(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        p["bias"].copy_(c["bias"][2:])
        p["experts"].copy_(c["experts"][1])

    layout = record(load, {"bias": torch.empty(3), "experts": torch.empty(2, 4)}, {"bias": (5,), "experts": (3, 2, 4)})
    assert layout.boxes["bias"] == (Box("bias", 0, 1, 2, 3, "bias", 0, 3, 1),)
    assert layout.boxes["experts"] == (Box("experts", 2, 2, 0, 4, "experts", 0, 4, 1),)


def test_a_transposed_parameter_has_its_strides_swapped() -> None:
    layout = record(lambda p, c: p["p"].t().copy_(c["t"]), {"p": torch.empty(3, 4)}, {"t": (4, 3)})
    assert layout.boxes["t"] == (Box("t", 0, 4, 0, 3, "p", 0, 1, 4),)


def test_a_flattened_copy_is_cut_at_rows() -> None:
    layout = record(lambda p, c: p["p"].view(-1).copy_(c["t"].view(-1)), {"p": torch.empty(2, 6)}, {"t": (4, 3)})
    assert layout.boxes["t"] == (Box("t", 0, 4, 0, 3, "p", 0, 3, 1),)


def test_a_layout_pickles() -> None:
    layout = record(lambda p, c: p["p"].copy_(c["t"]), {"p": torch.empty(4, 3)}, {"t": (4, 3)})
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_zeroed_rows_are_padding() -> None:
    def load(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        p["p"][:2].copy_(c["t"])
        p["p"][2:].fill_(0)

    layout = record(load, {"p": torch.empty(4, 3)}, {"t": (2, 3)})
    assert layout.padding == (Padding("p", 6, (2, 3), (3, 1)),)
    parameters = {"p": torch.full((4, 3), 7.0)}
    clear_padding(layout, parameters)
    assert parameters["p"].tolist() == [[7, 7, 7], [7, 7, 7], [0, 0, 0], [0, 0, 0]]


def test_replay_works_on_views_of_a_flat_buffer_and_casts() -> None:
    flat = torch.zeros(14, dtype=torch.bfloat16)
    parameters = {"p": torch.nn.Parameter(flat[2:].view(4, 3))}
    layout = record(lambda p, c: p["p"].copy_(c["t"]), parameters, {"t": (4, 3)})
    load_tensor(layout, parameters, "t", torch.arange(12.0).view(4, 3))
    assert flat.tolist() == [0, 0, *range(12)]
    out = torch.empty(4, 3)
    export_tensor(layout, parameters, "t", out)
    assert torch.equal(out, torch.arange(12.0).view(4, 3))


def test_a_tensor_of_another_shape_is_refused() -> None:
    layout = record(lambda p, c: p["p"].copy_(c["t"]), {"p": torch.empty(4, 3)}, {"t": (4, 3)})
    with pytest.raises(WeightSyncFailed, match=r"t has shape \[3, 4\], recorded was \[4, 3\]"):
        load_tensor(layout, {"p": torch.empty(4, 3)}, "t", torch.empty(3, 4))


def _twice(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
    p["p"].copy_(c["t"])
    p["p"][1].copy_(c["t"][0])


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda p, c: p["p"][:3].copy_(c["t"][:3]), "parameter p: 3 of 12 elements are neither loaded nor zeroed"),
        (lambda p, c: p["p"][:, :2].copy_(c["t"][:, :2]), "parameter p: 4 of 12 elements are neither"),
        (_twice, "parameter p: 3 of 12 elements are written more than once"),
        (lambda p, c: p["p"].copy_(c["t"] * 2), r"loader of t uses aten.mul.Tensor"),
        (lambda p, c: p["p"].copy_(c["t"].clone()), r"loader of t uses aten.clone.default"),
        (lambda p, c: p["p"].add_(c["t"]), r"loader of p, t uses aten.add_.Tensor"),
        (lambda p, c: p["p"].fill_(1), r"loader of p uses aten.fill_.Scalar"),
        (lambda p, c: p["p"].copy_(c["t"][0]), "loader of p repeats elements of t"),
        (lambda p, c: p["p"].copy_(torch.zeros(4, 3)), "neither a parameter nor a view of the checkpoint"),
        (lambda p, c: p["p"].view(-1)[:10].copy_(c["t"].view(-1)[1:11]), "10 steps of 1 elements over rows of 3"),
        (lambda p, c: p["p"].view(-1)[:9].copy_(c["t"].view(-1)[1:10]), "reads t across the ends of its rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused_by_name(load: Callable[..., None], message: str) -> None:
    with pytest.raises(WeightSyncFailed, match=message):
        record(load, {"p": torch.empty(4, 3)}, {"t": (4, 3)})


def test_the_same_copy_twice_is_one_box() -> None:
    def load(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        p["p"].copy_(c["t"])
        p["p"].copy_(c["t"])

    assert len(record(load, {"p": torch.empty(4, 3)}, {"t": (4, 3)}).boxes["t"]) == 1


def test_a_parameter_with_gaps_in_its_storage_is_counted_by_element() -> None:
    parameter = torch.empty(4, 5)[:, :3]
    layout = record(lambda p, c: p["p"].copy_(c["t"]), {"p": parameter}, {"t": (4, 3)})
    assert layout.boxes["t"] == (Box("t", 0, 4, 0, 3, "p", 0, 5, 1),)
    with pytest.raises(WeightSyncFailed, match="3 of 12 elements are neither"):
        record(lambda p, c: p["p"][1:].copy_(c["t"][1:]), {"p": parameter}, {"t": (4, 3)})


def test_what_is_left_of_a_region_and_the_part_fill_it() -> None:
    whole, part = Region(0, 4, 0, 5), Region(1, 2, 1, 3)
    rest = whole.minus(part)
    assert sum(region.size for region in rest) + part.size == whole.size
    assert all(region.intersect(part) is None for region in rest)


def test_an_engines_own_loader_is_recorded_without_touching_its_memory() -> None:
    parameters = {"qkv": torch.full((6, 2), 7.0), "head": torch.full((4, 2), 7.0)}

    def load_weights(checkpoint: Iterable[tuple[str, Tensor]]) -> set[str]:
        experts = torch.tensor([1, 0])  # a table of the loader's own
        for name, tensor in checkpoint:
            if name == "head":
                parameters["head"][:3].data.copy_(tensor)
                parameters["head"][3:].data.fill_(0)
            else:
                row = 3 * int(experts[0].item()) if name == "k" else 0
                parameters["qkv"].data.narrow(0, row, 3).copy_(tensor[1:4])
        return {"q", "k", "head"}

    layout = record_loader(load_weights, parameters, {"q": (5, 2), "k": (5, 2), "head": (3, 2)})
    assert layout.boxes == {
        "q": (Box("q", 1, 3, 0, 2, "qkv", 0, 2, 1),),
        "k": (Box("k", 1, 3, 0, 2, "qkv", 6, 2, 1),),
        "head": (Box("head", 0, 3, 0, 2, "head", 0, 2, 1),),
    }
    assert layout.padding == (Padding("head", 6, (1, 2), (2, 1)),)
    assert all(bool((value == 7.0).all()) for value in parameters.values())


def test_parameters_of_one_storage_cannot_be_told_apart() -> None:
    flat = torch.zeros(4)
    with pytest.raises(WeightSyncFailed, match="parameters a and b lie in one storage"):
        record_loader(lambda _: None, {"a": flat[:2], "b": flat[2:]}, {})


def test_a_loader_that_computes_is_refused() -> None:
    parameter = torch.zeros(2, 2)
    with pytest.raises(WeightSyncFailed, match="the loader of t uses aten.mul.Tensor"):
        record_loader(lambda pairs: parameter.copy_(dict(pairs)["t"] * 2), {"p": parameter}, {"t": (2, 2)})


def test_a_rank_that_loads_no_row_of_a_tensor_does_not_hold_it() -> None:
    # Rows 8..11 of a vocabulary of 5 that is padded to 16: vLLM copies an empty slice and zeroes the rest.
    parameter = torch.empty(4, 3)

    def load_weights(checkpoint: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in checkpoint:
            parameter[:0].copy_(tensor[5:])
            parameter[0:].fill_(0)
            parameter[4:].fill_(0)

    layout = record_loader(load_weights, {"embedding": parameter}, {"t": (5, 3)})
    assert layout.boxes == {}
    assert layout.padding == (Padding("embedding", 0, (4, 3), (3, 1)),)


def test_a_part_is_loaded_and_exported_at_its_row_and_column() -> None:
    # The parameter is the lower right quarter of the tensor: rows 2 and 3, columns 3 to 5.
    parameters = {"p": torch.zeros(2, 3)}
    layout = record(lambda p, c: p["p"].copy_(c["t"][2:, 3:]), parameters, {"t": (4, 6)})
    load_tensor(layout, parameters, "t", torch.arange(24.0).view(4, 6))
    assert parameters["p"].tolist() == [[15, 16, 17], [21, 22, 23]]
    out = torch.zeros(4, 6)
    export_tensor(layout, parameters, "t", out)
    assert out.tolist() == [[0] * 6, [0] * 6, [0, 0, 0, 15, 16, 17], [0, 0, 0, 21, 22, 23]]
