"""Cells of the gradient matrix, and the setups that measure them.

A setup is a layout, a model and a kind of recomputation: it needs a new model on every rank. The cells of a setup share
it; they differ in the loss, its aggregation and the split into micro-batches, or carry a mutation that must show.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

from rlframe.algorithms.base import Algorithm
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.sft import Sft, SftConfig
from rlframe.megatron.config.options import (
    ContextCommunication,
    ContextParallelConfig,
    MoeConfig,
    Recompute,
    RecomputeConfig,
)
from rlframe.megatron.config.parallel import Parallel
from rlframe.ops.aggregation import Aggregation
from tests.multiprocess.megatron.forced_routes import ROUTES

LENGTHS = [5, 17, 2, 9, 30, 1, 12, 6]
"""Two rollouts for each of four prompts."""
CONSTANT_LENGTH = 20
TEMPERATURE = 0.8
GRPO = {"clip_low": 0.2, "clip_high": 0.3, "kl_coefficient": 0.05, "entropy_coefficient": 0.01, "group_size": 2}
MODELS = dict.fromkeys(("dense", "shared"), ("qwen3", {})) | dict.fromkeys(
    ("moe", "replayed", "shared_moe"), ("qwen3_moe", {"mlp_only_layers": [1]})
)
"""Four layers each; those with experts have one dense layer, and their embedding for an output layer. The routers of
`replayed` choose what its batch says, at random, and so do transformers'. The rollouts of `shared` begin alike, and
what they have in common is computed once."""
SHARED = {"shared": 5, "shared_moe": 5}
"""Models of which the rollouts of a prompt have the first tokens in common, and at most how many."""
SHARED_MUTATIONS = ("prompt_of_the_first_only", "positions_from_zero")
WHOLE, BUDGET, SINGLE = "whole", "budget", "single"
"""Splits into micro-batches: one per rank, packed up to 31 tokens, or each sequence alone."""


@dataclass(frozen=True)
class Cell:
    """One loss and its gradient."""

    loss: str
    """grpo or sft."""
    aggregation: Aggregation
    split: str
    mutation: str = ""
    """What is done wrong on purpose, see `mutated`; nothing when empty."""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.mutation, self.loss, str(self.aggregation), self.split]))


@dataclass(frozen=True)
class Setup:
    """A model on all ranks of a layout."""

    parallel: Parallel
    model: str
    cells: tuple[Cell, ...] = field(repr=False)
    recompute: Recompute = Recompute.NONE
    communication: ContextCommunication = ContextCommunication.P2P
    dynamic: bool = False
    """Whether sequences are whole on context-parallel ranks, where that is even: all eight together are, and alone none
    is."""
    long: bool = False
    """Whether memory is saved as for long sequences: inputs of layers in host memory, logits by chunks."""
    float32_logits: bool = False
    """See ModelConfig. In float32 it is another way to compute the same."""

    def __str__(self) -> str:
        again = {Recompute.NONE: "", Recompute.FULL: " recompute", Recompute.SELECTIVE: " recompute experts"}
        how = "" if self.communication is ContextCommunication.P2P else f" {self.communication}"
        logits = " float32 logits" if self.float32_logits else ""
        dynamic = " dynamic" if self.dynamic else ""
        long = " long" if self.long else ""
        return f"{self.model} {self.parallel}{how}{dynamic}{again[self.recompute]}{long}{logits}"

    @property
    def settings(self) -> dict[str, Any]:
        """Of TrainConfig."""
        modules = ["moe"] if self.recompute is Recompute.SELECTIVE else []
        return {
            "parallel": self.parallel,
            "recompute": self.recompute,
            "recompute_options": RecomputeConfig(modules=modules),
            "moe": MoeConfig(router_replay=self.model == "replayed"),
            "context_parallel": ContextParallelConfig(communication=self.communication, dynamic=self.dynamic),
            "offload_activations": self.long,
            # Divides no rank's tokens: the last chunk is shorter.
            "logits_chunk_tokens": 7 if self.long else None,
            "share_prompts": self.model in SHARED,
        }


ROLLOUT_AGGREGATIONS = (Aggregation.PROMPT_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM_NORM)
"""Not for sft."""
SFT_AGGREGATIONS = tuple(each for each in Aggregation if each not in ROLLOUT_AGGREGATIONS)
LOSSES = [("grpo", each) for each in Aggregation] + [("sft", each) for each in SFT_AGGREGATIONS]
EVERY_CELL = tuple(Cell(*loss, how) for loss in LOSSES for how in (WHOLE, BUDGET, SINGLE))
CELLS_PER_SETUP = 4


def setups() -> list[Setup]:
    """One rank measures every cell; each further setup the next few, so that every loss meets layouts of every kind."""
    both = ("dense", "moe")
    layouts: list[tuple[Any, tuple[str, ...], Recompute]] = [
        ("d2", both, Recompute.NONE),
        ("t2", both, Recompute.FULL),
        ("p2", both, Recompute.NONE),
        ("p2v2", both, Recompute.FULL),
        ({"pp": 2, "first_stage_layers": 1}, both, Recompute.NONE),
        ("c2", both, Recompute.NONE),
        ("d2e2", ("moe",), Recompute.FULL),
        ("t2e2", ("moe",), Recompute.NONE),
        # Experts cut by tensor parallelism.
        ("t2|ffn:t2", ("moe",), Recompute.NONE),
        # Four ranks: two axes and three; from the middle on with another shape for the experts than for attention.
        ("t2p2v2", both, Recompute.NONE),
        ("t2c2", both, Recompute.FULL),
        ("d2c2", both, Recompute.NONE),
        ("c2p2v2", ("dense",), Recompute.NONE),
        ({"pp": 2, "pipeline_layout": "E|ttt|t|L"}, both, Recompute.NONE),
        ({"pp": 2, "dp": 2, "ep": 2, "last_stage_layers": 1}, ("moe",), Recompute.FULL),
        ("t2c2|ffn:e4", ("moe",), Recompute.NONE),
        ("t2p2|ffn:p2e2", ("moe",), Recompute.NONE),
        ("d2t2|ffn:t2e2", ("moe",), Recompute.NONE),
        ("d2t2e2", ("moe",), Recompute.FULL),
        ("c2p2|ffn:p2e2", ("moe",), Recompute.FULL),
    ]
    found = [Setup(Parallel(), "dense", EVERY_CELL), Setup(Parallel(), "moe", EVERY_CELL, Recompute.FULL)]
    cells = itertools.cycle(EVERY_CELL[::7] + EVERY_CELL[3::7] + EVERY_CELL[5::7])
    for layout, names, recompute in layouts:
        for name in names:
            parallel = Parallel(**layout) if isinstance(layout, dict) else Parallel.parse(layout)
            found.append(Setup(parallel, name, tuple(itertools.islice(cells, CELLS_PER_SETUP)), recompute))
    joined: dict[tuple[Parallel, str, Recompute], list[Cell]] = {}
    for setup in found + replayed_setups() + shared_setups() + mutated_setups():
        joined.setdefault((setup.parallel, setup.model, setup.recompute), []).extend(setup.cells)
    built = [Setup(parallel, model, tuple(cells), how) for (parallel, model, how), cells in joined.items()]
    return built + long_setups() + dynamic_setups()


def dynamic_setups() -> list[Setup]:
    """Micro-batches whose sequences are whole on a rank each, and others that the ranks share."""
    grpo = ("grpo", Aggregation.SEQ_MEAN_TOKEN_MEAN)
    right = (Cell(*grpo, BUDGET), Cell("sft", Aggregation.TOKEN_MEAN, WHOLE), Cell(*grpo, SINGLE))
    replayed = (Cell(*grpo, WHOLE), Cell(*grpo, BUDGET))
    a2a = ContextCommunication.A2A
    return [
        Setup(Parallel(cp=2), "moe", (*right, Cell(*grpo, WHOLE, "without_bounds")), dynamic=True),
        Setup(Parallel(cp=2), "dense", right, Recompute.FULL, communication=a2a, dynamic=True),
        Setup(Parallel.parse("c2p2v2"), "dense", right, Recompute.FULL, dynamic=True),
        Setup(Parallel.parse("t2c2|ffn:e4"), "moe", right, Recompute.FULL, long=True, dynamic=True),
        Setup(Parallel.parse("t2c2|ffn:e4"), "replayed", replayed, Recompute.SELECTIVE, dynamic=True),
    ]


def long_setups() -> list[Setup]:
    """What serves long sequences: exchange of heads between context-parallel ranks, inputs of layers in host memory,
    logits by chunks, which may be in float32."""
    cells = (
        Cell("grpo", Aggregation.SEQ_MEAN_TOKEN_MEAN, BUDGET),
        Cell("sft", Aggregation.TOKEN_MEAN, WHOLE),
        Cell("grpo", Aggregation.SEQ_MEAN_TOKEN_MEAN, SINGLE, "missing_sum"),
    )
    a2a = ContextCommunication.A2A
    return [
        Setup(Parallel(cp=2), "dense", cells, communication=a2a),
        Setup(Parallel(), "moe", cells[:2], Recompute.FULL, long=True),
        Setup(Parallel.parse("t2"), "dense", cells[:2], Recompute.FULL, long=True),
        Setup(Parallel.parse("t2"), "dense", cells[:2], float32_logits=True),
        Setup(Parallel.parse("t2"), "dense", cells[:2], Recompute.FULL, long=True, float32_logits=True),
        Setup(Parallel.parse("c2p2"), "dense", cells[:2], Recompute.FULL, communication=a2a, long=True),
        Setup(Parallel.parse("t2c2|ffn:e4"), "moe", cells[:2], Recompute.FULL, long=True),
    ]


def replayed_setups() -> list[Setup]:
    """Every way to cut the tokens and the layers whose routers replay, and to compute them again."""
    loss = ("grpo", Aggregation.SEQ_MEAN_TOKEN_MEAN)
    right, mutations = (Cell(*loss, SINGLE),), tuple(Cell(*loss, BUDGET, mutation) for mutation in ROUTES)
    layouts: list[tuple[str, Recompute, tuple[Cell, ...]]] = [
        ("d1", Recompute.FULL, right),
        ("p2v2", Recompute.SELECTIVE, right),
        ("t2c2|ffn:e4", Recompute.NONE, right + mutations),
        ("t2p2", Recompute.FULL, right),
    ]
    return [Setup(Parallel.parse(layout), "replayed", cells, how) for layout, how, cells in layouts]


def shared_setups() -> list[Setup]:
    """Shared prompts in every way to cut the tokens and the layers, and with recomputation."""
    right = (Cell("grpo", Aggregation.TOKEN_MEAN, WHOLE), Cell("sft", Aggregation.SEQ_MEAN_TOKEN_SUM, BUDGET))
    mutations = tuple(Cell("grpo", Aggregation.TOKEN_MEAN, WHOLE, each) for each in SHARED_MUTATIONS)
    layouts: list[tuple[str, str, Recompute]] = [
        ("shared", "d1", Recompute.NONE),
        ("shared", "d2", Recompute.FULL),
        ("shared", "t2p2", Recompute.NONE),
        ("shared_moe", "t2|ffn:e2", Recompute.NONE),
        ("shared_moe", "p2v2", Recompute.SELECTIVE),
    ]
    return [
        Setup(Parallel.parse(layout), model, right + (mutations if layout == "d1" else ()), how)
        for model, layout, how in layouts
    ]


def mutated_setups() -> list[Setup]:
    """Each mutation where it can be made."""

    def cells(*mutations: str) -> tuple[Cell, ...]:
        return tuple(
            Cell(*loss, BUDGET, mutation)
            for mutation in mutations
            for loss in (("grpo", Aggregation.SEQ_MEAN_TOKEN_MEAN), ("sft", Aggregation.TOKEN_MEAN))
        )

    return [
        Setup(Parallel(dp=2), "dense", cells("wrong_denominator", "dropped_mask", "missing_sum")),
        Setup(Parallel(cp=2), "dense", cells("missing_sum")),
        Setup(Parallel(dp=2, ep=2), "moe", cells("swapped_expert", "missing_sum")),
        Setup(Parallel.parse("t2c2|ffn:e4"), "moe", cells("swapped_expert", "wrong_denominator", "dropped_mask")),
    ]


def algorithm(cell: Cell) -> Algorithm:
    """The loss of the cell, as the trainer gets it."""
    if cell.loss == "sft":
        return Sft(SftConfig(aggregation=cell.aggregation))
    normed = cell.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    return Grpo(GrpoConfig(aggregation=cell.aggregation, constant_length=CONSTANT_LENGTH if normed else None, **GRPO))
