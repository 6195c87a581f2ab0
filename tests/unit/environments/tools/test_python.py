"""The tool python as the policy meets it, and what it refuses to do without."""

import ast
import os
import shutil
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from rlframe.environments.tools.python import Python, PythonConfig
from rlframe.environments.tools.sandbox.box import Kind
from rlframe.utils.errors import ConfigError
from tests.unit.environments.tools.test_escapes import SYSTEM_PYTHON, answered
from tests.unit.environments.tools.test_tools import called, contents, session
from tests.until import under_a_fair_limit

pytestmark = pytest.mark.later

ANSWERS = {
    "print('a')\n1 + 1": "a\n2\n",
    "x = 1": "(no output)",
    "None": "(no output)",
    "'caf\u00e9'": "'caf\u00e9'\n",
    "import sys; print('b', file=sys.stderr); print('a')": "b\na\n",
    "import sys; sys.exit(3)": "(no output)\n(exit code 3)",
    # 255 minus 128 is no signal.
    "import sys; print('a'); sys.exit(-1)": "a\n\n(exit code 255)",
    "import sys; sys.stdout.buffer.write(b'\\xff\\n'); None": "\ufffd\n",
    "print(input())": "EOFError: EOF when reading a line\n",
    "1/0": "ZeroDivisionError: division by zero\n",
    "1 +": '  File "<code>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax\n',
    "a\0": "null bytes\n",
    "def f(x):\n    return f(x - 1) if x else __name__\nf(3)": "'__main__'\n",
    "open('/proc/self/oom_score_adj').read()": "'1000\\n'\n",
    "import os; os.getcwd(), os.listdir()": "('/tmp/code', [])\n",
}


@pytest.fixture(scope="module", params=list(Kind), ids=str)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of each kind of sandbox that works here."""
    found = {"sandbox": request.param, "interpreter": None if request.param is Kind.BUBBLEWRAP else SYSTEM_PYTHON}
    if request.param is Kind.BUBBLEWRAP and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    try:
        Python.prepare(PythonConfig(**found))
    except ConfigError as error:
        pytest.skip(str(error))
    return found


def as_tool(settings: dict[str, Any]) -> dict[str, Any]:
    """The tool with these settings, as in YAML."""
    return {"name": "python", "options": {"timeout_s": 20.0, **settings, "sandbox": str(settings["sandbox"])}}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_interpreter_may_lie_in_the_folder_that_the_sandbox_has_for_itself() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, with_pip=False, symlinks=True)
        answer = answered("import sys; sys.prefix", interpreter=f"{folder}/bin/python")
        assert answer == f"{folder!r}\n"


@pytest.mark.parametrize("code", ANSWERS)
def test_the_answer_is_what_the_code_writes_and_its_last_value(code: str, settings: dict[str, Any]) -> None:
    answer = answered(code, **settings)
    if settings["sandbox"] is Kind.PROCESS and "getcwd" in code:
        assert answer.endswith("', [])\n")
    elif code in ("print(input())", "1/0", "a\0"):
        assert answer.endswith(ANSWERS[code])
    else:
        assert answer == ANSWERS[code]


def test_nothing_is_kept_from_call_to_call(settings: dict[str, Any]) -> None:
    tool = as_tool(settings)
    code = "import os, sys; sys.rlframe = 1; open('a', 'w').close(); print(os.listdir())"
    turns = [called(("python", {"code": code})), called(("python", {"code": "print(os)"}), ("python", {"code": code}))]
    offered, (first, second) = session(turns, tools={"python": tool})
    assert offered == ["python"]
    assert contents(first) == ["['a']\n"]
    assert contents(second)[0].endswith("NameError: name 'os' is not defined\n") and contents(second)[1] == "['a']\n"


def test_limits_hold_in_a_plain_process_too(settings: dict[str, Any]) -> None:
    code = "import time; print('a', flush=True); time.sleep(6000)"
    told = ". Until then it wrote:\na\n"
    late = under_a_fair_limit(
        lambda limit_s: answered(code, **settings, timeout_s=limit_s), lambda answer: told in answer, first_s=2.0
    )
    assert "took longer than 2" in late and told in late
    for code, more, told in (
        ("while True: print('x' * 1000)", {}, "wrote more than 1048576 bytes"),
        ("x = bytearray(600 << 20)", {}, "MemoryError"),
        ("open('a', 'wb').write(bytes(100 << 20))", {}, "File too large"),
    ):
        assert told in answered(code, **settings, **more)


def test_a_long_answer_is_cut_in_the_middle(settings: dict[str, Any]) -> None:
    tool = as_tool(settings)
    turn = called(("python", {"code": "print('a' * 5000 + 'b' * 5000)"}))
    _, (step,) = session([turn], tools={"python": tool}, max_answer_characters=100)
    (content,) = contents(step)
    assert len(content) <= 100 and content[0] == "a" and content[-2:] == "b\n" and "9937 characters left out" in content


def test_what_is_no_code_is_told(settings: dict[str, Any]) -> None:
    tool = as_tool(settings)
    turn = called(("python", {}), ("python", {"code": ["1"]}), ("python", {"code": "1" * 70000}))
    _, (step,) = session([turn], tools={"python": tool})
    assert contents(step) == [
        "Error: code must be text, got None",
        "Error: code must be text, got ['1']",
        "Error: code must have at most 65536 characters, got 70000",
    ]


def test_a_call_that_is_given_up_leaves_nothing_behind(settings: dict[str, Any]) -> None:
    tool = as_tool(settings)
    before = len(os.listdir("/proc/self/fd"))
    turn = called(("python", {"code": "import time; time.sleep(1000)"}))
    begun = time.monotonic()
    _, (step,) = session([turn], tools={"python": tool}, call_timeout_s=1.5)
    assert contents(step) == ["Error: took longer than 1.5 s"]
    assert time.monotonic() - begun < 600
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_the_time_of_further_calls_begins_when_they_have_a_place(settings: dict[str, Any]) -> None:
    code = "import time; a = time.time(); time.sleep(1); print(a, time.time())"
    tool = as_tool({**settings, "timeout_s": 2.0, "parallel": 1})
    _, (step,) = session([called(*[("python", {"code": code})] * 4)], tools={"python": tool}, call_timeout_s=3.0)
    spans = sorted(tuple(map(float, answer.split())) for answer in contents(step))
    assert all(earlier[1] <= later[0] for earlier, later in zip(spans, spans[1:], strict=False))


def test_without_bubblewrap_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="bubblewrap is not installed; install bubblewrap and allow user namespaces"):
        Python.prepare(PythonConfig())


def test_a_bubblewrap_that_may_do_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "bwrap: No permissions to create new namespace"
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{said}; install bubblewrap .* or set sandbox: process"):
        Python.prepare(PythonConfig())


def test_a_sandbox_in_which_a_first_program_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\nprintf '\\000begun\\nno such module'\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="a first program failed: no such module; install bubblewrap"):
        Python.prepare(PythonConfig())


def test_code_is_never_roots(settings: dict[str, Any]) -> None:
    if os.geteuid() != 0:
        pytest.skip("sessions are no root's")
    found = answered("import os; os.getresuid(), os.getresgid(), os.getgroups()", **settings)
    users, groups, others = ast.literal_eval(found)
    assert min(users) == max(users) >= 60578 and groups == users and others == []


def test_an_interpreter_that_is_none_is_refused() -> None:
    for kind in Kind:
        with pytest.raises(ConfigError, match="(/bin/false is no Python interpreter|bubblewrap is not installed)"):
            Python.prepare(PythonConfig(sandbox=kind, interpreter="/bin/false"))
