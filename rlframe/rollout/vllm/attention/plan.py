"""Divides the attention of a decode step into items, such that tokens which sequences share belong to one item.

vLLM's prefix cache gives sequences with the same prompt the same pages of keys and values. Sequences that have their
deepest shared page in common form a group. An item is a range of the tokens of a page table, and the sequences that
attend to it: up to `ROWS` of a group for tokens that it shares, one for the others. Everything is computed on the
device, because vLLM begins a step before the host knows the tokens of the one before.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 16
"""Most queries of an item, if one sequence has no more: the fewest that a product takes. Most items are the own tokens
of one sequence, whose few queries would fill a quarter of a larger block. 256 sequences with 32 heads of queries and 8
of keys took 90 microseconds with blocks of 16 and 129 with blocks of 32, 64 of eight prompts of 4,096 tokens 78 and 88;
with 4 heads of keys 51 with 16 and 72 with 64, and 59 and 56 (H200, 2026-11-30)."""
CHUNK_STEP = 64
"""Tokens of an item whose range is divided are a multiple of it."""
ITEMS_PER_PROGRAM = 4
"""Number of items for each program of the attention below which ranges are divided, so that no program is idle."""
SLOTS_PER_ROW, LEAST_SLOTS = 4, 1024
"""Partial results of shared tokens that each sequence may have on average, and that all may have in any case: few
sequences of long prompts need many, so that no program is idle."""
ITEM, PARTS = 6, 5
"""Numbers of an item (place, sequences, begin, end, slot, the row whose pages it has), and of the places of a
sequence's results (the first slot of shared tokens, the distance to the next, their number; the first slot of its own
tokens, and their number)."""

VARYING = ["num_rows"]
"""Numbers that change while an engine samples. Triton would compile kernels anew for 1, and for multiples of 16."""


@triton.jit
def _pages_in_common(tables, lengths, me, each, num_rows, width, halvings, PAGE: tl.constexpr):
    """Returns the number of whole pages before the last token that row `me` shares with each row, by bisection: rows
    that share a page share all before it."""
    own = tl.load(lengths + me, mask=me < num_rows, other=0)
    others = tl.load(lengths + each, mask=each < num_rows, other=0)
    least = tl.zeros_like(each)
    most = tl.maximum(tl.minimum(others, own) - 1, 0) // PAGE
    for _ in range(0, halvings):
        open_ = least < most
        middle = (least + most) // 2
        mine = tl.load(tables + me * width + middle, mask=open_, other=0)
        theirs = tl.load(tables + each.to(tl.int64) * width + middle, mask=open_, other=0)
        least = tl.where(open_ & (mine == theirs), middle + 1, least)
        most = tl.where(open_ & (mine != theirs), middle, most)
    return tl.where((own > 0) & (others > 0), least, 0), others > 0


@triton.jit(do_not_specialize=VARYING)
def _find_depths(tables, lengths, depths, num_rows, width, halvings, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the number of pages that a row shares with any other."""
    me = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK)
    common, _ = _pages_in_common(tables, lengths, me, each, num_rows, width, halvings, PAGE)
    tl.store(depths + me, tl.max(tl.where(each == me, 0, common)))


@triton.jit(do_not_specialize=VARYING)
def _find_groups(tables, lengths, depths, groups, num_rows, width, halvings, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Computes a row's group: its first row, the row's rank in it, its size, and its number of shared tokens."""
    me = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK)
    common, used = _pages_in_common(tables, lengths, me, each, num_rows, width, halvings, PAGE)
    depth = tl.load(depths + me)
    theirs = tl.load(depths + each, mask=each < num_rows, other=0)
    member = ((common >= depth) & (theirs == depth) & (depth > 0) & used) | ((each == me) & used)
    size = tl.sum(member.to(tl.int32))
    tl.store(groups + me * 4, tl.min(tl.where(member, each, BLOCK)))
    tl.store(groups + me * 4 + 1, tl.sum((member & (each < me)).to(tl.int32)))
    tl.store(groups + me * 4 + 2, size)
    tl.store(groups + me * 4 + 3, tl.where(size > 1, depth * PAGE, 0))


@triton.jit
def _chunk_of(
    tokens, shared, longest, heads, programs, budget,
    LEAST: tl.constexpr, FULL: tl.constexpr, LONG: tl.constexpr, STEP: tl.constexpr, PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Returns the most tokens of an item whose range is divided.

    Args:
        tokens: that are read.
        shared: of all sequences, each counted for itself.
        longest: number of items of `LONG` tokens.
        budget: most results of shared tokens.
    """
    each = tl.cdiv(tokens * heads, programs)
    # Where all items run at once, half of the programs read as fast as all, and longer ranges have less to begin and to
    # join. Where they do not, short ones leave fewer programs idle at the end.
    alone = tl.minimum(tl.maximum(2 * each, LEAST), LONG)
    in_turns = tl.minimum(tl.maximum(each, LEAST), FULL)
    least = tl.where(longest * heads <= programs, alone, in_turns)
    chunk = tl.maximum(tl.cdiv(tokens * heads, programs * PER_PROGRAM), tl.cdiv(shared, budget))
    return tl.maximum(tl.cdiv(chunk, STEP) * STEP, least)


@triton.jit
def _parts_of(tokens, chunk, PAGE: tl.constexpr):
    """Returns the numbers of like parts of ranges, and the tokens of one: whole pages, of a full chunk at most."""
    number = tl.maximum(tl.cdiv(tokens, chunk), 1)
    size = tl.maximum(tl.cdiv(tl.cdiv(tokens, number), PAGE), 1) * PAGE
    return tl.cdiv(tokens, size), size


@triton.jit
def _divide(items, first, step, number, place, rows, begin, end, chunk, slot, me):
    """Stores `number` items of `chunk` tokens of row `me` each, the last of which may have fewer. They are `step` items
    apart."""
    for index in range(0, number):
        item = items + (first + index * step) * 6
        tl.store(item, place)
        tl.store(item + 1, rows)
        tl.store(item + 2, begin + index * chunk)
        tl.store(item + 3, tl.minimum(begin + (index + 1) * chunk, end))
        tl.store(item + 4, slot + index * rows)
        tl.store(item + 5, me)


@triton.jit(do_not_specialize=VARYING)
def _make_items(
    lengths, groups, order, items, parts, count, num_rows, heads, programs, budget,
    ROWS: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr, FULL: tl.constexpr, LONG: tl.constexpr,
    STEP: tl.constexpr, PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the items that begin with a row, and the places of its results."""
    me = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    length = tl.load(lengths + each, mask=each < num_rows, other=0)
    used = length > 0
    leader = tl.load(groups + each * 4, mask=used, other=BLOCK)
    rank = tl.load(groups + each * 4 + 1, mask=used, other=0)
    size = tl.load(groups + each * 4 + 2, mask=used, other=0)
    shared = tl.load(groups + each * 4 + 3, mask=used, other=0)
    own = length - shared
    rows = tl.where(used & (rank % ROWS == 0), tl.minimum(size - rank, ROWS), 0)
    read = tl.where(rows > 0, shared, 0)
    longest = tl.sum(tl.cdiv(own, LONG)) + tl.sum(tl.cdiv(read, LONG))
    numbers = (tl.sum(own) + tl.sum(read), tl.sum(shared), longest, heads, programs, budget)
    chunk = _chunk_of(*numbers, LEAST, FULL, LONG, STEP, PER_PROGRAM)
    num_shared, shared_chunk = _parts_of(read, chunk, PAGE)
    num_own, own_chunk = _parts_of(own, chunk, PAGE)
    all_shared, all_slots = tl.sum(num_shared), tl.sum(num_shared * rows)
    tl.store(count, all_shared + tl.sum(num_own), mask=me == 0)
    mine, before = each == me, each < me
    my_leader, my_rank = tl.sum(tl.where(mine, leader, 0)), tl.sum(tl.where(mine, rank, 0))
    my_shared, my_rows = tl.sum(tl.where(mine, shared, 0)), tl.sum(tl.where(mine, rows, 0))
    my_length = tl.sum(tl.where(mine, length, 0))
    place = tl.sum((used & (leader < my_leader)).to(tl.int32)) + my_rank
    if my_length > 0:
        tl.store(order + place, me)
    # The tokens that its group shares, if it is the first of up to ROWS of it, and its own tokens. Items of the same
    # tokens follow one another, so that they are read from memory once, and then from the GPU's cache.
    blocks = tl.cdiv(tl.sum(tl.where(mine, size, 0)), ROWS)
    first = tl.sum(tl.where(used & (leader < my_leader), num_shared, 0)) + my_rank // ROWS
    slot = tl.sum(tl.where(before, num_shared * rows, 0))
    number, my_chunk = tl.sum(tl.where(mine, num_shared, 0)), tl.sum(tl.where(mine, shared_chunk, 0))
    _divide(items, first, blocks, number, place, my_rows, 0, my_shared, my_chunk, slot, me)
    first = all_shared + tl.sum(tl.where(before, num_own, 0))
    slot = all_slots + tl.sum(tl.where(before, num_own, 0))
    my_own, my_chunk = tl.sum(tl.where(mine, num_own, 0)), tl.sum(tl.where(mine, own_chunk, 0))
    _divide(items, first, 1, my_own, place, 1, my_shared, my_length, my_chunk, slot, me)
    # Where its results are.
    head = used & (leader == my_leader) & (rank == my_rank - my_rank % ROWS)
    head_row = tl.sum(tl.where(head, each, 0))
    shared_slot = tl.sum(tl.where(each < head_row, num_shared * rows, 0)) + my_rank % ROWS
    tl.store(parts + me * 5, shared_slot)
    tl.store(parts + me * 5 + 1, tl.sum(tl.where(head, rows, 0)))
    tl.store(parts + me * 5 + 2, tl.sum(tl.where(head & (my_length > 0), num_shared, 0)))
    tl.store(parts + me * 5 + 3, slot)
    tl.store(parts + me * 5 + 4, my_own)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The way in which the attention runs."""

    programs: int
    """Programs for each of the device's processors."""
    tokens: int
    """Keys that a program reads at once, of heads of up to 128 numbers."""
    warps: int
    stages: int
    """Loads that are under way at the same time."""
    chunk: int = 256
    """Fewest tokens of an item whose range is divided."""
    full_chunk: int = 256
    """The same where that leaves no program idle."""
    long_chunk: int = 384
    """The same where so few items are needed that all run at once."""


NARROW, MIDDLE, WIDE = Tuning(8, 16, 1, 3, 128, 192), Tuning(4, 16, 2, 3), Tuning(6, 16, 4, 3)
"""For items of up to 16 queries, up to 32, and more. The first is the best of 27 in six batches on an H200, the others
are the best of twelve in one or two batches, while an engine started on the same GPU, with other bounds of `chunk`.
Its bounds are the best of 20 in 16 batches: ten sequences of five prompts of 4,096 tokens took 33 microseconds with
items of 384 tokens, 41 with 192, and 64 of eight such prompts 74 and 70 (H200, 2026-11-30)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The items of a decode step, in memory that CUDA graphs may refer to: every step fills it anew."""

    page: int
    """Tokens of a page."""
    rows: int
    """Most sequences of an item."""
    heads: int
    """Number of heads of keys and values."""
    programs: int
    """Number of programs of the attention."""
    tuning: Tuning
    depths: Tensor
    """[B] int32 pages that a row shares with another."""
    groups: Tensor
    """[B, 4] int32: the first row of a row's group, its rank there, the group's size, and the tokens that it shares."""
    order: Tensor
    """[B] int32: the rows, group by group."""
    items: Tensor
    """[S, ITEM] int32."""
    parts: Tensor
    """[B, PARTS] int32. The numbers of results are zero for rows that are not used."""
    count: Tensor
    """[1] int32: number of items."""
    partial: Tensor
    """[S, H, D] float32 results of items."""
    logsumexps: Tensor
    """[S, H] float32: base-2 logarithms of the sums that the results were divided by."""

    @classmethod
    def of(
        cls,
        *,
        max_rows: int,
        page: int,
        heads: int,
        query_heads: int,
        width: int,
        processors: int,
        device: torch.device,
        tuning: Tuning | None = None,
    ) -> "Plan":
        """Allocates a plan.

        Args:
            max_rows: most sequences of a step.
            width: dimension of a head.
            processors: number of the device's multiprocessors.
            tuning: what the number of queries asks for when None.
        """
        group = query_heads // heads
        tuning = tuning or tuning_for(group)
        programs = tuning.programs * processors
        # Each sequence has at most one range that is not full, of shared tokens and of its own.
        num_slots = 2 * max_rows + most_shared(max_rows) + ITEMS_PER_PROGRAM * programs

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            page=page,
            rows=rows_of_item(group),
            heads=heads,
            programs=programs,
            tuning=tuning,
            depths=whole(max_rows),
            groups=whole(max_rows, 4),
            order=whole(max_rows),
            items=whole(num_slots, ITEM),
            parts=whole(max_rows, PARTS),
            count=whole(1),
            partial=torch.zeros(num_slots, query_heads, width, device=device),
            logsumexps=torch.zeros(num_slots, query_heads, device=device),
        )

    def fill(self, tables: Tensor | None, lengths: Tensor, *, regroup: bool = True) -> None:
        """Makes the items of a step.

        Args:
            tables: [B, P] int32 numbers of each sequence's pages. None if the rows are not regrouped.
            lengths: [B] int32 tokens of each sequence, its last one included; 0 of rows that are not used.
            regroup: False if the rows are those of the step before, one token longer: they share the same pages.
        """
        max_rows = len(self.order)
        num_rows, block = min(len(lengths), max_rows), triton.next_power_of_2(max_rows)
        grid = (max_rows,)
        if regroup:
            assert tables is not None, "rows share pages by their tables"
            num_rows = min(num_rows, len(tables))
            sizes = (num_rows, tables.stride(0), tables.shape[1].bit_length())
            _find_depths[grid](tables, lengths, self.depths, *sizes, PAGE=self.page, BLOCK=block)
            _find_groups[grid](tables, lengths, self.depths, self.groups, *sizes, PAGE=self.page, BLOCK=block)
        _make_items[grid](
            lengths,
            self.groups,
            self.order,
            self.items,
            self.parts,
            self.count,
            num_rows,
            self.heads,
            self.programs,
            most_shared(max_rows),
            ROWS=self.rows,
            PAGE=self.page,
            LEAST=self.tuning.chunk,
            FULL=self.tuning.full_chunk,
            LONG=self.tuning.long_chunk,
            STEP=CHUNK_STEP,
            PER_PROGRAM=ITEMS_PER_PROGRAM,
            BLOCK=block,
        )


def most_shared(max_rows: int) -> int:
    """Returns the most partial results of shared tokens, but for one of each sequence."""
    return max(SLOTS_PER_ROW * max_rows, LEAST_SLOTS)


def rows_of_item(group: int) -> int:
    """Returns the most sequences of an item, where `group` heads of queries read each head of keys and values."""
    return max(QUERIES // group, 1)


def queries_of_item(group: int) -> int:
    """Returns the queries of a block, some of which may be unused."""
    return max(QUERIES, triton.next_power_of_2(rows_of_item(group) * group))


def tuning_for(group: int) -> Tuning:
    """Returns the tuning where `group` heads of queries read each head of keys and values."""
    if group <= QUERIES:
        return NARROW
    return MIDDLE if group <= 2 * QUERIES else WIDE
