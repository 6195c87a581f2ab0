"""Parallel layouts: the size of each axis, and the position of a rank. Imports neither torch nor megatron."""

import re
from dataclasses import dataclass, fields
from typing import Annotated, Any

from rlframe.models.stages import parse_pipeline_layout
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError

SHORTHAND = re.compile(r"([a-z])(\d+)")
AXES = {"d": "dp", "t": "tp", "p": "pp", "v": "vpp", "c": "cp", "e": "ep"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Sizes of the parallel axes: fields, or AReaL's shorthand `d2p1t2`, or `d1p1t2|ffn:d1p1t1e2` for MoE layers.

    The world has dp * tp * pp * cp ranks. Experts are distributed over the same ranks in another way, and etp * ep * pp
    must divide their number. `rlframe.models.stages` divides the layers into stages.
    """

    dp: Annotated[int, Range(1, 1 << 16)] = 1
    """Data parallel: ranks with different sequences and equal weights."""
    tp: Annotated[int, Range(1, 1 << 16)] = 1
    """Tensor parallel. Above 1 always with sequence parallelism."""
    pp: Annotated[int, Range(1, 1 << 16)] = 1
    """Pipeline parallel."""
    vpp: Annotated[int, Range(1, 1 << 16)] = 1
    """Chunks of layers of each pipeline stage (interleaved schedule, `v` in the shorthand). 1 is the plain schedule."""
    cp: Annotated[int, Range(1, 1 << 16)] = 1
    """Context parallel: ranks that share the tokens of each sequence."""
    ep: Annotated[int, Range(1, 1 << 16)] = 1
    """Expert parallel: ranks that share the experts of a layer. It need not divide DP."""
    etp: Annotated[int, Range(1, 1 << 16)] = 1
    """Tensor parallel inside an expert."""
    first_stage_layers: Annotated[int, Range(1, 10_000)] | None = None
    """Layers of the first pipeline stage. null means an equal share. Megatron's num_layers_in_first_pipeline_stage."""
    last_stage_layers: Annotated[int, Range(1, 10_000)] | None = None
    """Layers of the last pipeline stage. null means an equal share."""
    pipeline_layout: str | None = None
    """Contents of each chunk of the pipeline in Megatron's notation, such as `Et*3|(tt|)*29,t|L`. It also determines
    vpp."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("first_stage_layers", "last_stage_layers", "pipeline_layout"):
            if getattr(self, name) is not None and self.pp == 1:
                hint = "remove it or raise pp"
                raise SettingError(name, "has no effect with pp=1", got=getattr(self, name), hint=hint)
        if self.pipeline_layout is not None:
            self._take_chunks(self.pipeline_layout)
        if self.vpp > 1 and self.pp == 1:
            raise SettingError("vpp", "has no effect with pp=1", got=self.vpp, hint="remove it or raise pp")
        if self.world % (self.etp * self.ep * self.pp):
            raise ValueError(
                f"world {self.world} = dp {self.dp} * tp {self.tp} * pp {self.pp} * cp {self.cp} must be a multiple of "
                f"etp * ep * pp = {self.etp} * {self.ep} * {self.pp} = {self.etp * self.ep * self.pp}"
            )

    def _take_chunks(self, layout: str) -> None:
        """Sets vpp to the number of chunks per stage in pipeline_layout."""
        for name in ("first_stage_layers", "last_stage_layers"):
            if getattr(self, name) is not None:
                raise SettingError(
                    name, "has no effect with pipeline_layout", got=getattr(self, name), hint="remove it"
                )
        count = len(parse_pipeline_layout(layout))
        if count % self.pp:
            raise SettingError("pipeline_layout", f"{layout!r} has {count} chunks, which pp {self.pp} must divide")
        if self.vpp not in (1, count // self.pp):
            must = f"must be {count // self.pp} = {count} chunks / pp {self.pp}"
            raise SettingError("vpp", must, got=self.vpp, hint="remove it")
        object.__setattr__(self, "vpp", count // self.pp)

    def __str__(self) -> str:
        """Returns `d1p2t2`, or every field that differs from its default if the shorthand cannot express it."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if set(changed) <= set(AXES.values()):
            return "d" + "".join(
                [str(self.dp), *(f"{k}{changed[axis]}" for k, axis in AXES.items() if axis in changed and k != "d")]
            )
        return "{" + ", ".join(f"{name}: {value}" for name, value in changed.items()) + "}"

    @property
    def world(self) -> int:
        """Number of ranks: dp * tp * pp * cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stages(self) -> dict[str, Any]:
        """The fields that divide the layers into stages: arguments of `rlframe.models.stages.chunk_layers`."""
        names = ("pp", "vpp", "first_stage_layers", "last_stage_layers", "pipeline_layout")
        return {name: getattr(self, name) for name in names}

    @property
    def edp(self) -> int:
        """Expert data parallel: copies of each expert, world / (etp * ep * pp)."""
        return self.world // (self.etp * self.ep * self.pp)

    @classmethod
    def parse(cls, text: "str | Parallel") -> "Parallel":
        """Returns the layout of a shorthand: `d2t2p1`, `d2e2` (EP over the ranks of the other axes) or
        `d4t1|ffn:d1t1e4` (expert axes spelled out).

        Raises:
            ValueError: an unknown or repeated letter, a size of 0, or expert axes that do not fill the same world.
        """
        if isinstance(text, Parallel):
            return text
        try:
            return cls._of_shorthand(text)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None

    @classmethod
    def _of_shorthand(cls, text: str) -> "Parallel":
        dense_text, bar, expert_text = text.removeprefix("attn:").partition("|")
        dense = cls._axes(dense_text)
        if not bar:
            return cls(**dense)
        expert = {"tp": 1, "pp": 1, "dp": 1, "ep": 1} | cls._axes(expert_text.removeprefix("ffn:"))
        if "ep" in dense or "cp" in expert or "vpp" in expert:
            raise ValueError("e belongs to the ffn part, c and v to the attention part")
        if expert["pp"] != dense.get("pp", 1):
            raise ValueError(f"p must be the same in both parts, got {dense.get('pp', 1)} and {expert['pp']}")
        expert_world = expert["dp"] * expert["tp"] * expert["pp"] * expert["ep"]
        world = cls(**dense).world
        if expert_world != world:
            raise ValueError(f"the ffn part fills {expert_world} ranks, the attention part {world}")
        return cls(**dense, ep=expert["ep"], etp=expert["tp"])

    @staticmethod
    def _axes(part: str) -> dict[str, int]:
        pairs = SHORTHAND.findall(part)
        letters = [letter for letter, _ in pairs]
        if not pairs or "".join(letter + size for letter, size in pairs) != part or len(set(letters)) != len(letters):
            raise ValueError(f"{part!r} is not a layout such as d2, d1t2p1 or d4t1|ffn:d1t1e4")
        if unknown := set(letters) - set(AXES):
            raise ValueError(f"unknown axis {sorted(unknown)[0]!r}; known are {', '.join(AXES)}")
        if any(int(size) < 1 for _, size in pairs):
            raise ValueError("every size must be at least 1")
        return {AXES[letter]: int(size) for letter, size in pairs}


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Position of a rank in the layout."""

    rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    reports: bool
    """True on the one rank per data-parallel index that has the results: last stage, tensor and context rank 0."""
