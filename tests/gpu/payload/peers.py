"""Packs TRL and verl for a GPU machine without a network, in parts of at most 48 MB.

    python tests/gpu/payload/peers.py path/to/payload.py OUT

`payload.py` is the tool that packs vLLM, Ray and Megatron-Core for the same machine: its `build` makes the parts, here
of the packages in examples/benchmarks/peers/*.txt alone. On the machine, with OUT/*/part* in ~/peers:

    mkdir -p ~/peers_site && cat ~/peers/part* | xz -dc | tar x -C ~/peers_site
    export PYTHONPATH=$HOME/peers_site:$PYTHONPATH
"""

import argparse
import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType

PINS = Path(__file__).resolve().parents[3] / "examples/benchmarks/peers"
HOPPER = 90
"""The architecture whose GPU code stays in libraries."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", type=Path, help="payload.py")
    parser.add_argument("out", type=Path, help="folder of the parts; what is in it is deleted")
    parser.add_argument("--part-mb", type=int, default=48)
    arguments = parser.parse_args()
    tool = loaded(arguments.tool)
    with tempfile.TemporaryDirectory() as folder:
        # The tool reads requirements.txt and wheels/ beside itself.
        tool.HERE = Path(folder)
        (tool.HERE / "requirements.txt").write_text("\n".join(pins()) + "\n")
        tool.build(arguments.out, [], HOPPER, arguments.part_mb)


def loaded(file: Path) -> ModuleType:
    """Returns a Python file as a module."""
    spec = importlib.util.spec_from_file_location("payload", file)
    assert spec and spec.loader, f"{file} is Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins() -> list[str]:
    """Returns the packages of all peers, each once."""
    lines = [line for file in sorted(PINS.glob("*.txt")) for line in file.read_text().splitlines()]
    return sorted({line for line in lines if line and not line.startswith("#")})


if __name__ == "__main__":
    main()
