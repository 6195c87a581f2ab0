"""What is read from files is never a pickle: torch.load has weights_only, and nobody else unpickles a file."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.meta.checkout import ROOT, python_files

BETWEEN_PROCESSES = {
    "rlframe/attempts/sessions/worker.py",
    "rlframe/data/parallel.py",
    "rlframe/megatron/worker/worker.py",
    "rlframe/processes/worker.py",
    "rlframe/rollout/sglang/answers.py",
    "rlframe/rollout/sglang/engine.py",
    "rlframe/rollout/sglang/host.py",
    "rlframe/rollout/sglang/launch.py",
    "rlframe/rollout/sglang/worker.py",
    "rlframe/rollout/vllm/engine.py",
    "rlframe/rollout/vllm/worker.py",
    "rlframe/weight_sync/layout/wire.py",
}
"""Unpickle what another process of the same run has sent them through a pipe, a socket or Ray."""


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Every node of every file of the package, by its path in the checkout."""
    paths = [path for path in python_files() if path.is_relative_to(ROOT / "rlframe")]
    return {str(path.relative_to(ROOT)): list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}


def written(function: ast.expr) -> str:
    """Returns `module.name` of a function that is called so, else nothing."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return ""


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Each call in the package whose function is written as `name`, with its file and line."""
    for path, found in nodes().items():
        for node in found:
            if isinstance(node, ast.Call) and written(node.func) == name:
                yield f"{path}:{node.lineno}", node


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
    # Under another name it would not be seen.
    for path, there in nodes().items():
        for node in there:
            assert not (isinstance(node, ast.ImportFrom) and node.module in ("pickle", "cloudpickle", "dill")), path
            if isinstance(node, ast.Import):
                assert not any("pickle" in each.name and each.asname for each in node.names), path


def test_numpy_reads_no_pickles() -> None:
    for where, call in calls("np.load"):
        assert {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}.get("allow_pickle") == "False", (
            where
        )
