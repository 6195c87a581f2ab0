"""Ways out of the sandbox, each tried. `docs/environments.md` lists them with their results."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlframe.environments.tools.base import ToolError
from rlframe.environments.tools.python import Python, PythonConfig
from rlframe.environments.tools.sandbox.box import Kind
from rlframe.utils.errors import ConfigError
from tests.unit.environments.tools.escapes import ESCAPES, FORKS, LIMITS, Escape
from tests.until import under_a_fair_limit, until

pytestmark = pytest.mark.later

ROOT = Path(__file__).parents[4]
SYSTEM_PYTHON = "/usr/bin/python3"
GUARD = f"import os, sys\nif os.path.exists({__file__!r}): sys.exit('ESCAPED: no sandbox')\n"
"""Comes before code that would harm this machine."""
NOBODY = 65534


def dashed(name: str) -> str:
    """A name without spaces."""
    return name.replace(" ", "-")


def answered(code: str, **settings: Any) -> str:
    """What the policy reads."""

    async def run() -> str:
        config = PythonConfig(**({"timeout_s": 20.0} | settings))
        Python.prepare(config)
        try:
            return await Python(config).call("python", {"code": code})
        except ToolError as error:
            return f"Error: {error}"

    return asyncio.run(run())


@pytest.fixture(scope="module")
def bubblewrap() -> None:
    """Skips where bubblewrap does not work."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    try:
        Python.prepare(PythonConfig())
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def outside() -> Iterator[str]:
    """Code that names what lies outside, all of which can be reached by a plain process."""
    # A plain process that root starts is another user's.
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "secret").write_text("secret")
    name = f"\0{uuid.uuid4()}"
    listeners = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    addresses: list[Any] = [("127.0.0.1", 0), str(folder / "socket"), name]
    for listener, address in zip(listeners, addresses, strict=True):
        listener.bind(address)
        listener.listen()
    (folder / "socket").chmod(0o777)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    names = {
        "PORT": listeners[0].getsockname()[1],
        "PORT_OF_DATAGRAMS": datagrams.getsockname()[1],
        "SOCKET": str(folder / "socket"),
        "ABSTRACT": name,
        "SECRET": str(folder / "secret"),
        "SESSION": os.getpid(),
        "HOME": str(Path.home()),
        "PREFIX": sys.prefix,
    }
    os.environ["SECRET_OF_SESSION"] = "secret"
    yield "".join(f"{key} = {value!r}\n" for key, value in names.items())
    del os.environ["SECRET_OF_SESSION"]
    for each in (*listeners, datagrams):
        each.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda each: dashed(each.name))
def test_no_code_gets_out(escape: Escape, outside: str, bubblewrap: None) -> None:
    answer = answered(GUARD + outside + escape.code)
    assert "ESCAPED" not in answer, answer
    assert escape.told in answer, answer


@pytest.mark.parametrize("escape", [each for each in ESCAPES if each.plain], ids=lambda each: dashed(each.name))
def test_a_plain_process_gets_out(escape: Escape, outside: str) -> None:
    """The code of the ways out is right: where nothing holds it, it gets out."""
    assert "ESCAPED" in answered(outside + escape.code, sandbox=Kind.PROCESS, interpreter=SYSTEM_PYTHON)


def test_no_code_gets_out_of_the_sandbox_of_a_user_without_rights(outside: str, bubblewrap: None) -> None:
    """Root makes sandboxes in another way than everybody else."""
    if os.geteuid() != 0:
        pytest.skip("the other tests run as such a user")
    program = (
        "import json, sys\n"
        "from tests.unit.environments.tools.test_escapes import ESCAPES, GUARD, answered\n"
        f"outside = {outside!r}\n"
        "answers = {each.name: answered(GUARD + outside + each.code) for each in ESCAPES}\n"
        f"answers['fork bomb'] = answered(GUARD + {FORKS!r})\n"
        "print(json.dumps(answers))"
    )
    found = subprocess.run(
        [SYSTEM_PYTHON, "-c", program],
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "SECRET_OF_SESSION": "secret", "HOME": "/"},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip(f"no interpreter for such a user: {found.stderr[-300:]}")
    answers = json.loads(found.stdout)
    told = {each.name: each.told for each in ESCAPES} | {"fork bomb": "BlockingIOError"}
    assert {name: answer for name, answer in answers.items() if "ESCAPED" in answer} == {}
    assert {name: answer for name, answer in answers.items() if told[name] not in answer} == {}


@pytest.mark.parametrize("name", LIMITS, ids=lambda name: dashed(name))
def test_what_needs_too_much_is_ended(name: str, bubblewrap: None) -> None:
    code, settings, told = LIMITS[name]
    answer = answered(GUARD + code, **({"timeout_s": 60.0} | settings))
    assert "ESCAPED" not in answer and told in answer, answer[-2000:]


@pytest.mark.parametrize("ends", [True, False])
def test_nothing_that_the_code_has_started_survives_it(ends: bool, bubblewrap: None) -> None:
    seconds = f"60.{uuid.uuid4().int % 10**9:09}"
    code = (
        "import os, subprocess, time\n"
        f"subprocess.Popen(['sleep', '{seconds}'])\n"
        f"subprocess.Popen(['sleep', '{seconds}'], start_new_session=True)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execvp('sleep', ['sleep', '{seconds}'])\n    os._exit(0)\n"
        f"print('begun')\ntime.sleep({0.2 if ends else 6000})"
    )
    answer = under_a_fair_limit(
        lambda limit_s: answered(code, timeout_s=limit_s), lambda found: found.endswith("begun\n"), first_s=3.0
    )
    late = r"Error: the code took longer than 3(00?)? s. Until then it wrote:\nbegun\n"
    assert re.fullmatch("begun\n" if ends else late, answer), answer
    until(lambda: not any(seconds in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])))
