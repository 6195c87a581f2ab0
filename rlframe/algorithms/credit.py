"""Credit: what the turns of an attempt get of what it has earned. A setting of algorithms whose baseline is the group.

Source: `state` is Feng et al. 2025, arXiv 2505.10978 (GiGPO), equations 5 to 8. `turn` is the reward to go with the
mean of the group in the place of a learned baseline; no paper's own.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.ops.advantages import NormalizeBy, group_advantages
from rlframe.ops.turns import together, turn_returns, turn_rewards, turns_of
from rlframe.types.batch import Batch
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError


class Credit(StrEnum):
    """Ways to share an attempt's earnings among its turns."""

    OUTCOME = "outcome"
    """Every token gets the advantage of the whole attempt (GRPO)."""
    TURN = "turn"
    """Each turn gets the advantage of what it earned from there on, compared with the same turns of the group's other
    attempts."""
    STATE = "state"
    """Each turn gets the advantage of the whole attempt, and that of what it earned from there on, compared with all
    turns of the group in the same state (GiGPO, arXiv 2505.10978, equations 6 to 8)."""


class Peers(StrEnum):
    """Turns of a group that a turn is compared with."""

    SAME_TURN = "same_turn"
    """Turns of the same number, counted from the beginning of their attempts. A turn that no other attempt has reached
    gets 0."""
    ALL_TURNS = "all_turns"
    """All turns of the group."""


@dataclass(kw_only=True, slots=True)
class CreditConfig:
    """Settings of credit by turn. What a turn earned from there on is R_t = sum over k >= t of discount^(k - t) * r_k.
    Reward r_k is what turn k got from the environment and from reward functions by turn; other rewards come with the
    last turn."""

    by: Credit = Credit.OUTCOME
    """Way to share an attempt's earnings among its turns. Divisors are those of normalize_by, of the turns that are
    compared."""
    discount: Annotated[float, Range(0, 1)] = 1.0
    """Discount of a reward one turn later. Not with by=outcome. verl-agent's GiGPO scripts use 0.95."""
    peers: Peers = Peers.SAME_TURN
    """Turns that a turn is compared with. Only with by=turn."""
    weight: Annotated[float, Range(above=0, maximum=1e4)] = 1.0
    """Weight of the turn's advantage beside the attempt's. Only with by=state."""

    def __post_init__(self) -> None:
        check_bounds(self)
        idle = {
            "discount": self.by is Credit.OUTCOME,
            "peers": self.by is not Credit.TURN,
            "weight": self.by is not Credit.STATE,
        }
        default = {"discount": 1.0, "peers": Peers.SAME_TURN, "weight": 1.0}
        for name, is_idle in idle.items():
            if is_idle and (value := getattr(self, name)) != default[name]:
                raise SettingError(name, f"has no effect with by={self.by}", got=value, hint="remove it")


def turn_advantages(
    batch: Batch, penalty: Float[Tensor, " T"], config: CreditConfig, *, by: NormalizeBy
) -> Float[Tensor, " T"]:
    """Returns [T] (R_t - mean of its peers' R) / F on the tokens of each turn in the loss, F being the divisor of `by`.

    A turn without peers gets 0.

    Args:
        penalty: taken off the rewards, at each token.
    """
    turns = turns_of(batch)
    returns = turn_returns(turn_rewards(batch, turns, penalty), turns, discount=config.discount)
    if config.by is Credit.STATE:
        peers = together(turns.group, turns.state)
    elif config.peers is Peers.SAME_TURN:
        peers = together(turns.group, turns.place)
    else:
        peers = turns.group
    return turns.on_tokens(group_advantages(returns, peers, by=by), batch)
