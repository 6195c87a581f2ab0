"""Tasks of a task set of the package `verifiers`: `verifiers:ID`, or with settings of the task set
`verifiers:ID?size=500&split=train`.

An id is what the package calls one, the name of an installed module; besides, a module with its package
(`package.module`) and a file (`path/to/file.py`), which travels to the sessions. The environment `verifiers` plays the
tasks.
"""

import hashlib
import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl

from rlframe.data.builtin.arithmetic import Split, split_of
from rlframe.data.builtin.reasoning_gym import whole_number
from rlframe.data.records import Record
from rlframe.utils import outside
from rlframe.utils.errors import DataError

PREFIX = "verifiers:"
FIELD = "verifiers"
"""Field of a record that the environment needs: the settings of the task set, and the task."""
ROOMS = ("tasksets", "envs")
"""Rooms of the package in which it looks for an id."""
MISSING = "install the package verifiers: pip install 'rlframe[verifiers]'"


def records(path: str, split: Split) -> list[Record]:
    """Returns the tasks of one part. A hash of what a task says holds out a tenth. `size` reads the first tasks only,
    and must be given where a task set has no end.

    Raises:
        DataError: the package is not installed, has no such task set, or refuses its settings.
    """
    name, settings = parsed(path)
    size = whole_number(path, settings, "size", 1, least=1) if "size" in settings else None
    found = taskset(path, {"id": name, **settings})
    if size is None and not found.bounded:
        raise DataError(f"{path}: the task set has no end; say how many tasks to read, as in {PREFIX}{name}?size=1000")
    return [_record(name, settings, task, path) for task in islice(found, size) if split_of(_says(task)) is split]


def parsed(path: str) -> tuple[str, dict[str, Any]]:
    """Returns the id of the task set, and its settings.

    Example:
        >>> parsed("verifiers:gsm8k-v1?size=100&split=train")
        ('gsm8k-v1', {'size': 100, 'split': 'train'})
    """
    name, _, query = path.removeprefix(PREFIX).partition("?")
    return name, {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}


def taskset(path: str, settings: dict[str, Any]) -> Any:
    """Returns a task set of the package.

    Raises:
        DataError: see `records`.
    """
    try:
        # Optional: the extra `verifiers`.
        import verifiers.v1 as vf
    except ImportError as error:
        raise DataError(f"{path}: {MISSING}") from error
    try:
        known = known_as(settings["id"])
        config = vf.taskset_config_type(known).model_validate({**settings, "id": known})
        return vf.load_taskset(config)
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        raise DataError(f"{path}: verifiers cannot load the task set: {error}") from error


def known_as(identity: str) -> str:
    """Returns the id by which the package finds a module. It looks for names without a dot; the module of a file or of
    another package is entered under such a name.

    Raises:
        ImportError, OSError: there is no such module.
    """
    if "." not in identity.partition("@")[0]:
        return identity
    name = f"rlframe_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    for room in ROOMS:
        entry = f"verifiers.v1.{room}.{name}"
        if entry not in sys.modules:
            in_file = identity.endswith(".py")
            module = outside.module_of_file(identity) if in_file else importlib.import_module(identity)
            # Where it has none, importlib says that there is no such module.
            module.__spec__ = module.__spec__ or ModuleSpec(module.__name__, None)
            sys.modules[entry] = module
    return name


def _record(name: str, settings: dict[str, Any], task: Any, path: str) -> Record:
    data = task.data
    return Record(
        fields={
            "id": task.key,
            "prompt": _prompt(data) or data.name or f"task {data.idx}",
            FIELD: {"taskset": {"id": name, **settings}, "data": data.model_dump(mode="json")},
        },
        source=name,
        where=f"{path} task {data.idx}",
        task=_says(task),
    )


def _says(task: Any) -> str:
    """Returns all that a task says, as one text: not its place and its names, which two equal ones may have."""
    return task.data.model_dump_json(exclude={"idx", "id", "name"})


def _prompt(data: Any) -> list[dict[str, str]]:
    """Returns the beginning of a conversation as far as the task has it; a harness may add to it."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return system + [{"role": "user", "content": data.prompt_text}] if data.prompt else []


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
