"""Leases of a stream that has a prompt several times."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from rlframe.attempts.account.leases import Lease, Leases
from rlframe.attempts.account.ledger import Ledger
from rlframe.data.config import DataConfig
from rlframe.data.prompts import PromptSource
from rlframe.models.hub import EMBEDDED
from rlframe.rollout.base.seeds import request_seed


def leases_of(folder: Path) -> Leases:
    """Over a file with a prompt in two windows."""
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{x}+0=", "answer": str(x)}) + "\n" for x in (1, 2, 1, 3)))
    config = DataConfig(path=str(file), streaming=True, shuffle_buffer=2, evaluation_count=0, shuffle=False)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "qwen3_moe_tiny")
    return Leases(PromptSource(config, tokenizer=tokenizer, seed=0), Ledger(folder))


def seed_of(lease: Lease) -> int:
    parts = {name: getattr(lease, name) for name in ("step", "epoch", "again", "repeat")}
    return request_seed(run_seed=0, prompt_id=lease.prompt.id, sample_index=0, **parts)


def test_a_prompt_that_a_step_has_twice_in_an_epoch_has_other_seeds_the_second_time(tmp_path: Path) -> None:
    leases = leases_of(tmp_path)
    taken = leases.take(4, step=1, version=0)
    assert taken[0].prompt.id == taken[2].prompt.id and len({seed_of(each) for each in taken}) == 4
    assert [each.repeat for each in taken] == [0, 0, 1, 0]
    assert [each.repeat for each in leases.take(2, step=2, version=1)] == [0, 0]


def test_a_run_that_resumes_within_a_step_counts_on(tmp_path: Path) -> None:
    leases = leases_of(tmp_path)
    leases.take(2, step=1, version=0)
    state = json.loads(json.dumps(leases.state()))
    resumed = leases_of(tmp_path)
    resumed.restore(state)
    assert resumed.take(2, step=1, version=0) == leases.take(2, step=1, version=0)
    assert resumed.state() == leases.state()
    del state["dealt_in_step"]
    resumed.restore(state)
    assert [each.repeat for each in resumed.take(2, step=1, version=0)] == [0, 0]
