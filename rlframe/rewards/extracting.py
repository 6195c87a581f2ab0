"""The answers that attempts give, as a reward reads them: the votes of maj@k."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlframe.processes.pool import Pool
from rlframe.processes.work import Failed, Limits, PoolError, TaskFailed, Work
from rlframe.rewards.base import Attempt, build_reward
from rlframe.rewards.config import FIRST_CALL_S, RewardConfig, RewardTerm
from rlframe.utils.errors import RewardError

LONGEST_ANSWER = 10_000
"""Greatest number of characters of an answer."""


@dataclass(frozen=True, slots=True)
class Extracting(Work):
    """Reads the answer of one attempt at a time."""

    part: RewardTerm

    def prepare(self) -> Callable[[Attempt], str | None]:
        """Builds the reward, which may import a user's code.

        Raises:
            RewardError: it does not say which answer a response gives.
        """
        reward = build_reward(self.part, key="reward.parts")
        if not reward.extracts:
            raise RewardError(
                f"the reward {self.part.name!r} does not say which answer a response gives; a class derived from "
                "Reward says it with `def extract(self, attempt: Attempt) -> str | None`"
            )

        def run(attempt: Attempt) -> str | None:
            found = reward.extract(attempt)
            if found is not None and not (isinstance(found, str) and len(found) <= LONGEST_ANSWER):
                raise TaskFailed(f"an answer must be text of at most {LONGEST_ANSWER} characters, or None")
            return found

        return run


def extracted(config: RewardConfig, name: str, attempts: Sequence[Attempt]) -> list[str | None]:
    """Returns the answer of each attempt, as the part `name` reads it. None where it gives none, or where the part
    fails.

    Raises:
        RewardError: the part does not say which answer a response gives, or no worker can be started.
    """
    with _pool(config, name, size=config.workers) as pool:
        try:
            found = pool.run(attempts)
        except PoolError as error:
            raise RewardError(str(error)) from error
    return [None if isinstance(each, Failed) else each for each in found]


def try_extracting(config: RewardConfig, name: str) -> None:
    """Raises RewardError, with the reason, if the part `name` does not say which answer a response gives."""
    with _pool(config, name, size=1) as pool:
        try:
            pool.try_start()
        except PoolError as error:
            raise RewardError(str(error)) from error


def _pool(config: RewardConfig, name: str, *, size: int) -> Pool:
    part = config.parts[name]
    timeout_s = part.timeout_s or config.timeout_s
    limits = Limits(timeout_s=timeout_s, memory_gb=config.memory_gb, first_s=FIRST_CALL_S)
    return Pool(Extracting(part), limits, size=size, name="reward")
