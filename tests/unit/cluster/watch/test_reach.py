"""An address where nothing listens is known at once."""

import socket

import pytest

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.runtime import running
from rlframe.cluster.watch.reach import refusal
from rlframe.utils.errors import ConfigError


def test_a_port_that_listens_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert refusal(f"127.0.0.1:{port}") is None and refusal(f"ray://127.0.0.1:{port}") is None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        # Nobody listens.
        refused = refusal(f"127.0.0.1:{port}")
    assert "refused" in (refused or "")


@pytest.mark.parametrize("address", ["auto", "local", "no-port"])
def test_other_forms_are_left_to_ray(address: str) -> None:
    assert refusal(address) is None


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no.such.host.invalid:6379"])
def test_what_is_no_address_is_said(address: str) -> None:
    assert refusal(address)


def test_a_run_that_is_to_join_a_cluster_where_none_is_ends_in_seconds() -> None:
    # Bound, so that nobody else gets it, and not listening.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cluster.address: nothing listens at '127.0.0.1:{port}' \(.*refused"):
            with running(ClusterConfig(address=f"127.0.0.1:{port}"), num_devices=1):
                pass
