"""Parallel layouts: how many ways each axis is split, and where a rank stands. Imports neither torch nor megatron."""

import re
from dataclasses import dataclass

SHORTHAND = re.compile(r"([a-z])(\d+)")
AXES = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How many ways each axis is split, as in AReaL's shorthand: `d2p1t2`, or `d1p1t2|ffn:d1p1t1e2` for MoE layers."""

    dp: int = 1
    """Data parallel: ranks with different sequences and equal weights."""
    tp: int = 1
    """Tensor parallel, always with sequence parallelism when above 1."""
    pp: int = 1
    """Pipeline parallel."""
    cp: int = 1
    """Context parallel."""
    ep: int = 1
    """Expert parallel: ranks that share out the experts of a layer. It does not divide DP."""
    etp: int = 1
    """Tensor parallel inside an expert."""

    @property
    def world(self) -> int:
        """Number of ranks: dp * tp * pp * cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> int:
        """Expert data parallel: copies of each expert, world / (etp * ep * pp)."""
        return self.world // (self.etp * self.ep * self.pp)

    @classmethod
    def parse(cls, text: str) -> "Parallel":
        """`d2t2p1`, `d2e2` (EP over the ranks of the other axes) or `d4t1|ffn:d1t1e4` (expert axes spelled out).

        Raises:
            ValueError: an unknown or repeated letter, a size of 0, or expert axes that do not fill the same world.
        """
        dense_text, bar, expert_text = text.removeprefix("attn:").partition("|")
        dense = cls._axes(dense_text, text)
        if not bar:
            parallel = cls(**dense)
        else:
            expert = cls._axes(expert_text.removeprefix("ffn:"), text)
            sizes = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1} | expert
            if "ep" in dense or "cp" in expert:
                raise ValueError(f"{text!r}: e belongs to the ffn part and c to the attention part")
            parallel = cls(**dense, ep=sizes["ep"], etp=sizes["tp"])
            if sizes["pp"] != parallel.pp:
                raise ValueError(f"{text!r}: p must be the same in both parts, got {parallel.pp} and {sizes['pp']}")
            expert_world = sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["ep"]
            if expert_world != parallel.world:
                raise ValueError(
                    f"{text!r}: the ffn part fills {expert_world} ranks, the attention part {parallel.world}"
                )
        ranks = parallel.etp * parallel.ep * parallel.pp
        if parallel.world % ranks:
            raise ValueError(
                f"{text!r}: world {parallel.world} = dp {parallel.dp} * tp {parallel.tp} * pp {parallel.pp} * cp "
                f"{parallel.cp} must be a multiple of etp * ep * pp = {ranks}"
            )
        return parallel

    @staticmethod
    def _axes(part: str, text: str) -> dict[str, int]:
        pairs = SHORTHAND.findall(part)
        letters = [letter for letter, _ in pairs]
        if not pairs or "".join(letter + size for letter, size in pairs) != part or len(set(letters)) != len(letters):
            raise ValueError(f"{text!r} is not a layout such as d2, d1t2p1 or d4t1|ffn:d1t1e4")
        if unknown := set(letters) - set(AXES):
            raise ValueError(f"{text!r}: unknown axis {sorted(unknown)[0]!r}; known are {', '.join(AXES)}")
        if any(int(size) < 1 for _, size in pairs):
            raise ValueError(f"{text!r}: every size must be at least 1")
        return {AXES[letter]: int(size) for letter, size in pairs}


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Where a rank stands in the layout."""

    rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    ep_rank: int
    reports: bool
    """True on the one rank per data-parallel index that has the results: last pipeline stage, tensor rank 0."""
