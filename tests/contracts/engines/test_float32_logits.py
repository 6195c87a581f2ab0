"""Engines in bfloat16 keep logits in float32 where that is asked for."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlframe.models.hub import read_config
from rlframe.rollout.base.engine import RolloutEngine
from rlframe.types.input import ModelInput
from tests.contracts.engines.kinds import ENGINES, Kind, param

pytestmark = pytest.mark.later
SEQUENCE = ModelInput(tuple(5 + index * index % 60 for index in range(100)))


def num_ties(engine: RolloutEngine, folder: Path) -> int:
    """Tokens that are as likely as another one in the same place: numbers of 8 bits are often equal, of 24 hardly."""
    vocab_size = read_config(folder)["vocab_size"]
    engine.gate.commit(0)
    (found,) = engine.top([SEQUENCE], vocab_size)
    engine.close()
    rows = found.logprobs[:, :-1].numpy()
    assert rows.shape == (len(SEQUENCE) - 1, vocab_size) and np.isfinite(rows).all()
    return sum(vocab_size - len(np.unique(row)) for row in rows)


@pytest.mark.parametrize("kind", [param(name) for name in ENGINES])
def test_an_engine_in_bfloat16_does_not_round_logits(kind: Kind, folder: Path) -> None:
    assert num_ties(kind.start(folder, dtype=torch.bfloat16, float32_logits=True), folder) < 10


@pytest.mark.parametrize("kind", [param("transformers")])
def test_without_it_logits_are_rounded(kind: Kind, folder: Path) -> None:
    assert num_ties(kind.start(folder, dtype=torch.bfloat16), folder) > 50
