"""The closing paragraph."""

import mmap
import os
import pathlib
import re
from typing import Any

import pytest

from rlframe.loops.reporting.start_up import StartUp
from rlframe.loops.reporting.summary import closing_paragraph, held_gigabytes, in_vain, outcome


def test_an_online_run_tells_what_changed() -> None:
    results = {
        "before/match_mean": 0.125, "after/match_mean": 0.75, "before/brief_mean": 0.5, "after/brief_mean": 0.25,
        "before/response_tokens_max": 9.0, "after/response_tokens_max": 3.0, "held_out_prompts": 64.0,
    }  # fmt: skip
    assert outcome(results) == (
        "Greedy answers to 64 held-out prompts: match 0.125 before and 0.750 after, brief 0.500 before and 0.250 after."
    )


def test_an_online_run_tells_what_changed_on_each_dataset() -> None:
    results = {"before/match_mean/sums": 0.125, "after/match_mean/sums": 0.75, "held_out_prompts": 64.0}
    assert outcome(results) == "Greedy answers to 64 held-out prompts: match/sums 0.125 before and 0.750 after."


def test_an_offline_run_tells_its_losses() -> None:
    assert outcome({"first_loss": 5.55555, "last_loss": 0.5}) == "The loss went from 5.5556 to 0.5000."


def test_an_offline_run_tells_what_held_out_items_say() -> None:
    results = {"first_loss": 0.7, "last_loss": 0.5, "held_out_items": 30.0, "before/other": 1.0, "after/other": 2.0}
    results |= {"before/reward_margin": 0.0, "after/reward_margin": 1.25, "before/loss": 0.69315, "after/loss": 0.5}
    results |= {"before/chosen_reward": 0.0, "after/chosen_reward": -0.5}
    assert outcome(results) == (
        "The loss went from 0.7000 to 0.5000. On 30 held-out items: loss 0.693 before and 0.500 after, reward margin "
        "0.000 before and 1.250 after, chosen reward 0.000 before and -0.500 after."
    )


def test_a_run_of_no_steps_tells_what_it_has_measured() -> None:
    online = {"before/match_mean": 0.125, "before/math/reward_mean": 0.5, "before/math/pass_at_2": 0.75}
    assert outcome(online | {"held_out_prompts": 64.0}) == (
        "Greedy answers to 64 held-out prompts: match 0.125. math: reward 0.500."
    )
    assert outcome({"before/loss": 0.5, "held_out_items": 30.0}) == "On 30 held-out items: loss 0.500."


def test_sets_of_prompts_are_told_apart() -> None:
    results = {"before/math/reward_mean": 0.5, "after/math/reward_mean": 0.75, "held_out_prompts": 0.0}
    assert outcome(results) == "math: reward 0.500 before and 0.750 after."
    results = {"before/geo_mean/reward_mean": 0.5, "before/geo_mean/lost_attempts": 0.0, "held_out_prompts": 0.0}
    assert outcome(results) == "geo_mean: reward 0.500."


def test_steps_in_vain_are_told() -> None:
    assert in_vain({"train/steps_without_advantage": 0.0}) == ""
    counts = {"train/steps_without_advantage": 3.0, "train/steps_without_tokens": 1.0}
    assert in_vain(counts) == "There were 3 steps whose advantages were all 0 and 1 steps without a token in the loss. "


def test_a_run_without_held_out_prompts_says_so() -> None:
    assert outcome({}) == "There were no held-out prompts."


def start_up() -> StartUp:
    parts = StartUp(10.0)
    parts.done("imports and checks", at=11.54)
    parts.done("Ray", at=14.04)
    return parts


@pytest.mark.skipif(not pathlib.Path("/proc/self/smaps_rollup").exists(), reason="the shares of pages are Linux's")
def test_a_page_that_processes_share_counts_once() -> None:
    memory = mmap.mmap(-1, 400 << 20)
    memory[::4096] = bytes(len(memory) // 4096)
    alone = held_gigabytes()
    told, ready = os.pipe()
    end, told_to_end = os.pipe()
    children: list[int] = []
    while len(children) < 3 and (child := os.fork()):
        children.append(child)
    if len(children) < 3:
        # A child: it reads its parent's pages, and holds them until it is told to end.
        os.close(told_to_end)
        os.write(ready, bytes(1 + max(memory[::4096])))
        os.read(end, 1)
        os._exit(0)
    for _ in children:
        os.read(told, 1)
    together = held_gigabytes()
    os.close(told_to_end)
    for child in children:
        os.waitpid(child, 0)
    assert alone > 0.4 and together - alone < 0.2, f"{alone} GB became {together}"


def test_the_paragraph_names_the_times_and_the_files_that_are_there(tmp_path: pathlib.Path) -> None:
    for name in ("checkpoints", "logs"):
        (tmp_path / name).mkdir()
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / name).touch()
    run: Any = {"name": "tiny", "output": str(tmp_path), "steps": 7}
    text = closing_paragraph(
        **run,
        results={"first_loss": 2.0, "last_loss": 1.0},
        phase_totals={"reward": 1.0, "train": 12.345, "rollout": 3.0},
        start_up=start_up(),
        total_s=22.0,
        joined=False,
    )
    memory = re.search(r" All processes together hold (\d+\.\d) GB\.", text)
    assert memory and float(memory[1]) > 0.1, "torch alone is more"
    assert text.replace(memory[0], "") == (
        "tiny: 7 steps done. The loss went from 2.0000 to 1.0000. Start-up took 4.0 s (imports and checks 1.5 s, Ray "
        "2.5 s), the whole run 22.0 s; by phase: "
        f"train 12.3 s, rollout 3.0 s, reward 1.0 s. In {tmp_path}: metrics.jsonl, checkpoints/, logs/, config.yaml."
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "samples.jsonl").touch()
    text = closing_paragraph(**run, results={}, phase_totals={}, start_up=start_up(), total_s=0, joined=True)
    assert " The driver alone holds " in text and "All processes" not in text, "workers of a cluster are not its own"
    assert text.endswith(
        f"In {tmp_path}: model/ (Hugging Face format), metrics.jsonl, samples.jsonl, tensorboard/, checkpoints/, "
        "logs/, config.yaml."
    )
