"""The import contracts of pyproject.toml hold, and the light parts stay light."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.checkout import ROOT

pytestmark = pytest.mark.later


def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_checking_a_configuration_loads_no_heavy_package() -> None:
    program = (
        "import sys, rlframe.run.check, rlframe.config.load, rlframe.run.folder, rlframe.launch\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'ray', 'vllm', 'sglang', 'megatron'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
