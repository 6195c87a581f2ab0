"""A run whose ranks find no memory ends with the prediction and with what would free memory."""

import re
from pathlib import Path

import pytest

from tests.multiprocess.program import LEARNING, Program

HUNGRY = '''
"""GRPO whose loss asks for more memory than there is."""

import torch

from rlframe.algorithms.grpo import Grpo, GrpoConfig


class Hungry(Grpo):
    def __init__(self, config: GrpoConfig):
        super().__init__(config)

    def loss(self, *arguments, **named):
        torch.empty(1 << 60, dtype=torch.uint8)
        return super().loss(*arguments, **named)
'''


@pytest.mark.thorough
def test_running_out_of_memory_says_role_call_prediction_and_advice(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    with Program(tmp_path / "run", LEARNING | {"algorithm.name": f"{tmp_path}/hungry.py:Hungry"}) as program:
        assert program.finish() == 1
        message = program.errors()
    said = re.search(
        r"^policy rank \d ran out of the memory of the host in train: .*\n(.*)\n(.*)", message, re.MULTILINE
    )
    assert said, message
    assert re.fullmatch(r"predicted for train: \d+\.\d\d GB on each of 2 devices with policy, engines", said[1])
    assert re.fullmatch(r"train\.\S+=\S+ \(from \S+\) would free \d+\.\d\d GB", said[2])
    assert "Traceback" not in message, message
    logs = [file.read_text() for file in (tmp_path / "run" / "logs").glob("policy-*.log")]
    assert any("in loss" in log for log in logs), "the worker's own stack"
