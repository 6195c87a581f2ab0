"""The parts of matrices are found on their ranks, put together, and taken apart again."""

import pytest
import torch

from rlframe.megatron.muon.jobs import Job, Part, Slice, jobs_of, rounds_of, slices_of
from rlframe.megatron.muon.newton_schulz import operations, orthogonalize, scale
from rlframe.weight_sync.layout.memory import MemoryLayout, load_tensor, record

QKV, FC1 = "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"
TENSORS = {"q": (16, 6), "k": (8, 6), "v": (8, 6), "gate": (10, 6), "up": (10, 6)}


def on_rank(rank: int, ranks: int) -> tuple[MemoryLayout, dict[str, torch.Tensor]]:
    """Returns the layout and the parameters of a tensor-parallel rank: two groups of two heads of four rows."""
    groups, width = 2 // ranks, 10 // ranks
    shapes = {QKV: (groups * 16, 6), FC1: (2 * width, 6)}

    def load(parameters: dict, checkpoint: dict) -> None:
        fused = parameters[QKV].view(groups, 16, 6)
        mine = slice(rank * groups, (rank + 1) * groups)
        for name, first, rows in (("q", 0, 8), ("k", 8, 4), ("v", 12, 4)):
            fused[:, first : first + rows].copy_(checkpoint[name].view(2, rows, 6)[mine])
        for index, name in enumerate(("gate", "up")):
            own = checkpoint[name][rank * width : (rank + 1) * width]
            parameters[FC1][index * width : (index + 1) * width].copy_(own)

    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return record(load, parameters, TENSORS), parameters


@pytest.mark.parametrize("cuts", [[0, 192], [0, 1, 100, 192], [0, 90, 96, 192]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_matrices_are_those_of_the_checkpoint_and_come_apart_as_they_were(ranks: int, cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    checkpoint = {name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()}
    held: dict[tuple, torch.Tensor] = {}
    parts = []
    for rank in range(ranks):
        layout, parameters = on_rank(rank, ranks)
        for name, value in checkpoint.items():
            load_tensor(layout, parameters, name, value)
        for name, own in slices_of(layout, parameters, alternating=False).items():
            flat = parameters[name].view(-1)
            ends = sorted({min(cut, len(flat)) for cut in cuts} | {len(flat)})
            for copy, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
                part = Part(rank=10 * rank + copy, slice=own, start=start, end=end)
                parts.append(part)
                held[part.key] = flat[start:end]
    jobs = jobs_of(reversed(parts), steps=5)
    assert sorted(job.elements for job in jobs) == [120, 192]
    for job in jobs:
        whole = job.matrices([held[part.key] for part in job.sources])
        names = [name.partition(" ")[0] for name, _ in job.slices[0].matrices]
        assert names in (["k", "q", "v"], ["gate", "up"])
        assert all(torch.equal(matrix, checkpoint[name]) for name, matrix in zip(names, whole, strict=True))
        assert job.cost(5) == sum(operations(*TENSORS[name], steps=5) for name in names)
        back = job.elements_of_parts([matrix / scale(*matrix.shape) for matrix in whole])
        for part, values in zip(job.parts, back, strict=True):
            torch.testing.assert_close(values, held[part.key])


def matrix(name: str, rows: int, rank: int) -> Part:
    own = Slice(parameter=name, shape=(rows, 4), origin=(0, 0), turned=False, matrices=((name, (range(rows),)),))
    return Part(rank=rank, slice=own, start=0, end=rows * 4)


def test_ranks_that_hold_a_matrix_share_the_work_and_do_no_other() -> None:
    # Ranks 0 and 1 both hold a to d, whole; rank 2 alone holds z.
    parts = [matrix(name, 8, rank) for name in "abcd" for rank in (0, 1)] + [matrix("z", 8, 2)]
    jobs = jobs_of(parts, steps=5)
    assert [job.owner for job in jobs] == [0, 1, 0, 1, 2]
    assert [[part.rank for part in job.sources] for job in jobs] == [[0], [0], [0], [0], [2]]
    assert [[part.rank for part in job.parts] for job in jobs] == [[0, 1]] * 4 + [[2]]


def test_a_round_has_a_bound_of_elements_for_each_rank() -> None:
    parts = [matrix(name, 8, 0) for name in "abc"] + [matrix("d", 100, 1), matrix("e", 8, 1)]
    rounds = rounds_of(jobs_of(parts, steps=5), limit=64)
    assert [[job.parts[0].slice.parameter for job in jobs] for jobs in rounds] == [["a", "b", "d"], ["c", "e"]]


def test_elements_that_no_rank_keeps_are_noticed() -> None:
    part = matrix("a", 8, 0)
    with pytest.raises(AssertionError, match="ranks keep 30"):
        Job([Part(rank=0, slice=part.slice, start=0, end=30)])


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_five_steps_bring_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalize(matrices, steps=5)
    assert found.shape == matrices.shape
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inner = left.mT @ found @ right.mT
    values = torch.diagonal(inner, dim1=-2, dim2=-1)
    assert ((values > 0.6) & (values < 1.3)).all(), "the same singular vectors, with values near 1"
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-4
    assert torch.equal(orthogonalize(torch.zeros(1, *shape), steps=5), torch.zeros(1, *shape))
