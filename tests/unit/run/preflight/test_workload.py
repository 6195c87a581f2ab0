"""The sequences of a step."""

from pathlib import Path

import pytest

from rlframe.run.check.context import algorithm_of
from rlframe.run.load import load
from rlframe.run.preflight.devices import KINDS
from rlframe.run.preflight.plan import Plan, plan
from tests.unit.run.preflight.models import QWEN3_4B, folder


def given(path: Path, recipe: str, **lengths: int) -> Plan:
    """The plan of a recipe for given data."""
    overrides = [f"model.path={folder(path, QWEN3_4B)}", "train.parallel=d1", "prompts_per_step=16"]
    run = load(recipe, overrides)
    return plan(run, algorithm_of(run), KINDS["h200"], **lengths)


@pytest.mark.parametrize(("recipe", "sequences"), [("sft_qwen3_8b", 16), ("dpo_qwen3_8b", 32), ("kto_qwen3_8b", 16)])
def test_a_pair_is_two_sequences(tmp_path: Path, recipe: str, sequences: int) -> None:
    work = given(tmp_path, recipe, prompt_tokens=512, response_tokens=512).workload
    assert (work.sequences, work.tokens) == (sequences, sequences * 1024)


def test_without_lengths_a_pair_fills_the_micro_batch_together(tmp_path: Path) -> None:
    found = given(tmp_path, "dpo_qwen3_8b")
    budget = found.run.train.max_tokens_per_microbatch
    assert found.workload.sequence_tokens == budget // 2
    assert found.workload.tokens == 16 * budget
