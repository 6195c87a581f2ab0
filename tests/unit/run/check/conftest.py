"""The embedded datasets are read once for each setting of them, not for each configuration."""

from collections.abc import Iterator
from typing import Any

import pytest

import rlframe.run.check.data as data_check


@pytest.fixture(autouse=True, scope="session")
def embedded_data_is_read_once() -> Iterator[None]:
    """The real reading, whose answer most tests of these files share."""
    load = data_check.load
    known: dict[str, Any] = {}

    def once(data: Any, **settings: Any) -> Any:
        if not str(data.path).startswith("arithmetic"):
            return load(data, **settings)
        key = f"{data} {settings}"
        if key not in known:
            known[key] = load(data, **settings)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_check, "load", once)
        yield
