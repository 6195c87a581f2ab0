"""Groups in files: what a checkpoint keeps of work in flight, and what a recording keeps of what was trained on.

A folder holds `groups.npz`, the arrays of all rollouts one after the other, and `groups.json`, everything else, sealed,
with the SHA-256 of the arrays. A token takes 13 bytes, its text apart: id, logprob and version of 4 each, and a flag.
Routes and rewards of tokens are in addition, where there are any. Nothing is pickled.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from rlframe.attempts.account import fields
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, Group, Rollout, members
from rlframe.types.turn import TurnRecord
from rlframe.utils.errors import CheckpointError
from rlframe.utils.files.sealed import read_sealed, to_sealed
from rlframe.utils.files.whole import whole_folder, writing

GROUPS = "groups.json"
ARRAYS = "groups.npz"
FORMAT = 1
BY_TOKEN = {"loss_mask": np.bool_, "rollout_logprobs": np.float32, "versions": np.int32}
"""Fields of every rollout with an entry for each token, and their types."""
ROUTES = "routes_"
"""Begins the names of the arrays of routes, which end with the type of their numbers."""
NO_ROUTES = (-1, -1, -1)
"""Stands for the shape of the routes of a rollout that has none."""


def write_groups(folder: Path, groups: Sequence[Group]) -> None:
    """Writes finished or unfinished groups to `folder`, in place of those that are there. After a crash at any moment
    the folder is complete, unchanged or absent.

    Of `Prompt.fields` those are kept that `fields.described` knows.

    Raises:
        OutputError: the folder cannot be written.
    """
    prompts = _Table()
    description = [
        {
            "id": group.id,
            "prompt": prompts.place(group.prompt),
            "rollouts": [_described(rollout, prompts) for rollout in group.rollouts],
        }
        for group in groups
    ]
    arrays = _arrays(prompts.prompts, members(groups))
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    content = {
        "format": FORMAT,
        "arrays": hashlib.sha256(buffer.getbuffer()).hexdigest(),
        "prompts": [_described_prompt(prompt) for prompt in prompts.prompts],
        "groups": description,
    }
    with whole_folder(folder) as aside, writing(folder):
        (aside / ARRAYS).write_bytes(buffer.getbuffer())
        (aside / GROUPS).write_bytes(to_sealed(content))


def read_groups(folder: Path) -> list[Group]:
    """Returns the groups of a folder, equal by value to those that were written.

    Raises:
        CheckpointError: a file is missing or damaged, belongs to another folder, or has another format.
    """
    content = read_sealed(folder / GROUPS)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise CheckpointError(
            f"{folder / GROUPS} has format {found}, this version of rlframe reads groups of format {FORMAT}"
        )
    arrays = _Arrays(_read_arrays(folder / ARRAYS, content["arrays"]))
    prompts = [
        Prompt(
            input=ModelInput(token_ids),
            messages=tuple(described.pop("messages", ())),
            tools=tuple(described.pop("tools", ())),
            fields=fields.restored(described),
            **described,
        )
        for token_ids, described in zip(arrays.prompts(), content["prompts"], strict=True)
    ]
    return [
        Group(
            id=group["id"],
            prompt=prompts[group["prompt"]],
            rollouts=[_rollout(described, prompts, arrays.next()) for described in group["rollouts"]],
        )
        for group in content["groups"]
    ]


class _Table:
    """The prompts of a folder, each once."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self._places: dict[int, int] = {}

    def place(self, prompt: Prompt) -> int:
        """Returns the index of a prompt, which stays alive as long as the table."""
        if id(prompt) not in self._places:
            self._places[id(prompt)] = len(self.prompts)
            self.prompts.append(prompt)
        return self._places[id(prompt)]


def _described_prompt(prompt: Prompt) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "messages": list(prompt.messages),
        "tools": list(prompt.tools),
        "text": prompt.text,
        "answer": prompt.answer,
        "source": prompt.source,
        "dataset": prompt.dataset,
        **fields.described(prompt.fields),
    }


def _described(rollout: Rollout, prompts: _Table) -> dict[str, Any]:
    """Returns what is not an array of a rollout. Its numbers are among the arrays, where NaN is a number."""
    return {
        "prompt": prompts.place(rollout.prompt),
        "sample_index": int(rollout.sample_index),
        "finish_reason": rollout.finish_reason.value,
        "text": rollout.text,
        "messages": rollout.messages,
        "numbers": dict(rollout.numbers),
        "sequence": rollout.sequence,
        **_turns_described(rollout),
        "reward_failed": bool(rollout.reward_failed),
        "parts": list(rollout.reward_parts),
        "weights": list(rollout.reward_weights),
    }


def _turns_described(rollout: Rollout) -> dict[str, Any]:
    """Returns what is known of turns, and of what went wrong. What is empty is left out."""
    found = {
        "records": [asdict(record) for record in rollout.records],
        "first_turn": rollout.first_turn,
        "first_sampled": rollout.first_sampled,
        "ending": rollout.ending,
        "turn_parts": {name: list(values) for name, values in rollout.turn_parts.items()},
        "reward_troubles": dict(rollout.reward_troubles),
    }
    return {name: value for name, value in found.items() if value}


def _arrays(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Returns everything that is a number, one rollout after the other."""
    scores = [
        [rollout.reward, *rollout.reward_parts.values(), *rollout.reward_weights.values()] for rollout in rollouts
    ]
    shapes = [NO_ROUTES if rollout.routes is None else rollout.routes.shape for rollout in rollouts]
    rewarded = [rollout.token_rewards for rollout in rollouts if rollout.token_rewards is not None]
    arrays = {
        "prompt_tokens": _joined([prompt.input.token_ids for prompt in prompts], np.int32),
        "prompt_lengths": np.array([len(prompt.input) for prompt in prompts], dtype=np.int64),
        "lengths": np.array([rollout.num_tokens for rollout in rollouts], dtype=np.int64),
        "token_ids": _joined([rollout.token_ids for rollout in rollouts], np.int32),
        **{name: _joined([getattr(rollout, name) for rollout in rollouts], dtype) for name, dtype in BY_TOKEN.items()},
        "scores": _joined([np.array(row, dtype=np.float64) for row in scores], np.float64),
        "has_token_rewards": np.array([rollout.token_rewards is not None for rollout in rollouts], dtype=np.bool_),
        "token_rewards": _joined(rewarded, np.float32),
        "route_shapes": np.array(shapes, dtype=np.int64).reshape(-1, 3),
        "route_types": np.array(["" if rollout.routes is None else str(rollout.routes.dtype) for rollout in rollouts]),
    }
    routes = [rollout.routes for rollout in rollouts if rollout.routes is not None]
    for kind in {str(each.dtype) for each in routes}:
        arrays[ROUTES + kind] = np.concatenate([each.ravel() for each in routes if str(each.dtype) == kind])
    return arrays


def _joined(rows: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Returns the rows as one, of type `dtype`, which they have unless there are none."""
    return np.concatenate([np.zeros(0, dtype=dtype), *rows])


class _Arrays:
    """Deals the numbers of one rollout after the other."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays
        self._at: dict[str, int] = {}
        self._rollout = -1

    def prompts(self) -> list[Int[np.ndarray, " L"]]:
        """Returns the tokens of each prompt."""
        ends = [0, *np.cumsum(self._arrays["prompt_lengths"]).tolist()]
        return [self._arrays["prompt_tokens"][start:end] for start, end in pairwise(ends)]

    def next(self) -> "_Arrays":
        """Returns itself, at the next rollout."""
        self._rollout += 1
        return self

    def take(self, name: str, count: int) -> np.ndarray:
        """Returns the next `count` numbers of an array."""
        start = self._at.get(name, 0)
        self._at[name] = start + count
        return self._arrays[name][start : start + count]

    def of(self, name: str) -> Any:
        """Returns the present rollout's row of an array with a row for each."""
        return self._arrays[name][self._rollout]

    def routes(self) -> np.ndarray | None:
        """Returns the routes of the present rollout."""
        shape = tuple(self.of("route_shapes").tolist())
        if shape == NO_ROUTES:
            return None
        return self.take(ROUTES + str(self.of("route_types")), int(np.prod(shape))).reshape(shape)


def _rollout(described: Mapping[str, Any], prompts: Sequence[Prompt], arrays: _Arrays) -> Rollout:
    length = int(arrays.of("lengths"))
    parts, weights = described["parts"], described["weights"]
    reward, *scores = arrays.take("scores", 1 + len(parts) + len(weights)).tolist()
    return Rollout(
        prompt=prompts[described["prompt"]],
        sample_index=described["sample_index"],
        input=ModelInput(arrays.take("token_ids", length)),
        **{name: arrays.take(name, length) for name in BY_TOKEN},
        finish_reason=FinishReason(described["finish_reason"]),
        routes=arrays.routes(),
        text=described["text"],
        messages=described.get("messages", []),
        numbers=described.get("numbers", {}),
        sequence=described.get("sequence", 0),
        records=tuple(_record(record) for record in described.get("records", ())),
        first_turn=described.get("first_turn", 0),
        first_sampled=described.get("first_sampled", 0),
        ending=described.get("ending", ""),
        turn_parts=described.get("turn_parts", {}),
        reward_troubles=described.get("reward_troubles", {}),
        token_rewards=arrays.take("token_rewards", length) if arrays.of("has_token_rewards") else None,
        reward=reward,
        reward_parts=dict(zip(parts, scores, strict=False)),
        reward_weights=dict(zip(weights, scores[len(parts) :], strict=True)),
        reward_failed=described["reward_failed"],
    )


def _record(described: Mapping[str, Any]) -> TurnRecord:
    lists = {name: tuple(described[name]) for name in ("malformed", "calls")}
    return TurnRecord(**{**described, **lists})


def _read_arrays(file: Path, digest: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a file with this SHA-256."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{file} is damaged, or not that of {GROUPS}: its SHA-256 is not the one given there")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)
