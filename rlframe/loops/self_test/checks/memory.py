"""Check: no process keeps more memory with every step."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Seen
from rlframe.utils.process.memory import MemoryUse

WARM_UP_STEPS = 2
"""Steps whose growth is that of caches and pools."""
NUM_SHOWN = 6
"""Greatest number of sizes that are shown."""
COMPILED = 5
"""Factor of the limit where each new shape adds to a cache of kernels: the main job in bfloat16 on a CPU adds 100 MB in
the third step and 20 in the twelfth."""
SHARE = 0.005
"""Fraction of a process's memory by which it may grow in a step, if that is more than the limit."""


class Memory(Check):
    """After the first steps no process grows in every step."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        steps = seen.steps[WARM_UP_STEPS - 1 :]
        names = [name for name in steps[0].memory if all(name in step.memory for step in steps)] if steps else []
        if len(steps) < WARM_UP_STEPS or not names:
            yield skipped("memory", f"needs more than {WARM_UP_STEPS} steps")
            return
        measures: dict[str, Callable[[MemoryUse], int]] = {
            "host": lambda memory: memory.own_bytes,
            "device": lambda memory: memory.tensor_bytes,
        }
        for where, measure in measures.items():
            held = {name: [measure(step.memory[name]) for step in steps] for name in names}
            slopes = {name: slope(sizes) for name, sizes in held.items()}
            sizes = {name: sizes[-1] for name, sizes in held.items()}
            if not any(sizes.values()):
                yield skipped(f"{where} memory", "no GPU")
                continue
            # A process that has nothing there is no answer.
            worst = max((name for name in names if sizes[name]), key=lambda name: slopes[name])
            most = seen.settings.leak_limit_mb * 1e6 * (COMPILED if seen.facts.compiles else 1)
            limit = max(most, SHARE * sizes[worst])
            yield found(
                f"{where} memory",
                f"{worst} grows {slopes[worst] / 1e6:+.3g} MB a step: "
                f"{', '.join(f'{size / 1e6:.0f}' for size in held[worst][-NUM_SHOWN:])} MB",
                fail=slopes[worst] > limit,
                threshold=f"at most {limit / 1e6:.3g} MB in every step after step {WARM_UP_STEPS}",
                look="a process keeps something of every step: logs/ has its log; more self_test.steps tell a leak "
                "from a cache that fills",
                numbers=slopes,
            )


def slope(sizes: list[int]) -> float:
    """Returns the bytes by which a process grows in a step: the median, or 0 if it did not grow in every step."""
    growth = [after - before for before, after in pairwise(sizes)]
    return float(median(growth)) if min(growth) > 0 else min(0.0, float(median(growth)))


CHECK = Memory
