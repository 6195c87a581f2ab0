"""What is read from files is never a pickle: torch.load has weights_only, and nobody else unpickles a file."""

import ast
from collections.abc import Iterator

from meta.checkout import ROOT, python_files

BETWEEN_PROCESSES = {
    "rlframe/rollout/sglang.py",
    "rlframe/rollout/sglang_host.py",
    "rlframe/rollout/sglang_launch.py",
    "rlframe/rollout/sglang_worker.py",
    "rlframe/rollout/vllm.py",
    "rlframe/rollout/vllm_worker.py",
}
"""Unpickle what another process of the same run has sent them through a pipe or a socket."""
ALLOWED = {"rlframe/megatron/checkpoint/metadata.py"} | BETWEEN_PROCESSES
"""The first derives an unpickler that knows a list of names."""


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Each call in the package whose function is written as `name`."""
    for path in python_files():
        if path.is_relative_to(ROOT / "rlframe"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_torch_load_takes_weights_only() -> None:
    found = dict(calls("torch.load"))
    assert found, "the search finds those that are there"
    for where, call in found.items():
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("weights_only") == "True", where


def test_no_file_is_unpickled() -> None:
    names = ("pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.load")
    found = {where.split(":")[0] for name in names for where, _ in calls(name)}
    assert found <= BETWEEN_PROCESSES
    importing = {
        str(path.relative_to(ROOT))
        for path in python_files()
        if path.is_relative_to(ROOT / "rlframe")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom) and "pickle" in ast.unparse(node)
    }
    assert importing - ALLOWED - {"rlframe/megatron/checkpoint/reading.py"} == set()


def test_numpy_reads_no_pickles() -> None:
    for where, call in calls("np.load"):
        assert {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}.get("allow_pickle") == "False", (
            where
        )
