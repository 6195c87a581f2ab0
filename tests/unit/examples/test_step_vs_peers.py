"""What the sides of step_vs_peers.py are given, and what is made of their steps."""

import argparse
import json
import sys
import zlib
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import step_vs_peers
from async_rl_engine import draw_length
from peers.inputs import SPECIAL, WORKLOADS, lengths, make_tokenizer, texts


def test_every_word_of_a_prompt_is_one_token_with_the_number_in_its_name(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(1000)
    assert [tokenizer.encode(each, add_special_tokens=False) for each in SPECIAL] == [[998], [999]]
    for text in islice(texts(WORKLOADS["tiny"], tmp_path, 1000), 50):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(word[1:]) for word in text.split()]


def test_lengths_are_those_that_rlframes_engine_draws_for_the_same_tokens() -> None:
    name, drawn = lengths("w5 w11 w700", WORKLOADS["tail"])
    assert name == zlib.crc32(np.array([5, 11, 700], dtype=np.int32).tobytes())
    generator = np.random.default_rng(name)
    assert drawn == [draw_length(generator, 400.0, 1.0, 2048) for _ in range(8)]
    assert lengths("w5 w11 w700", WORKLOADS["equal"]) == (name, [512] * 8)


def test_medians_and_peaks_are_of_the_counted_steps() -> None:
    # The first of 3 steps is not counted; samples are taken to arrive up to 0.05 s late.
    steps = [
        {"step": seconds, "train": seconds / 2, "at": end, "spans": [["train", end - seconds / 2, end]]}
        for seconds, end in ((8.0, 10.0), (4.0, 14.0), (2.0, 16.0))
    ]
    samples = [(9.0, 90.0), (10.5, 30.0), (13.0, 20.0), (15.5, 10.0)]
    found = step_vs_peers.figures(steps, samples, argparse.Namespace(warm_up=1, gpu=0, set=[]))
    assert found["median"] == {"step": 3.0, "train": 1.5}
    assert found["memory_bytes"] == {"all": 30.0, "train": 20.0}
    assert found["counted"] == 2


def test_a_line_of_verls_log_is_its_metrics_and_the_step() -> None:
    line = json.dumps({"step": 3, "data": {"timing_s/step": 1.5}})
    assert step_vs_peers.verl_metrics(line) == {"step": 3, "timing_s/step": 1.5}
