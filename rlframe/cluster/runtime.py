"""Ray's lifetime: joined if an address is given, started on this machine otherwise, and shut down after the run."""

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import ray
from ray._private import auto_init_hook, ray_constants, utils, worker
from ray._private.node import Node
from ray._raylet import (
    AuthenticationMode,  # pyright: ignore[reportAttributeAccessIssue]
    Config,  # pyright: ignore[reportAttributeAccessIssue]
    get_authentication_mode,  # pyright: ignore[reportAttributeAccessIssue]
)

from rlframe.cluster.config import LOCAL, ClusterConfig
from rlframe.cluster.environment import inherited, known
from rlframe.cluster.template import forking
from rlframe.cluster.watch.looking import ASKING, REMOTE_S
from rlframe.cluster.watch.reach import refusal
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

logger = logging.getLogger(__name__)

CLUSTERS = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
LOOPBACK = {
    # Ray's processes read it and then bind to 127.0.0.1 instead of to every interface.
    CLUSTERS: "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "SGLANG_HOST_IP": "127.0.0.1",
}
"""Variables that keep the processes of a run on one machine from listening on interfaces that other machines reach."""
UNREAD = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods of Ray's Node that start the server of the dashboard, the log monitor and the autoscaler. Nobody reads what
these processes find on one machine, and they take two seconds of every start."""
NO_PRESTART = {"RAY_prestart_worker_first_driver": "0"}
"""Keeps Ray from starting workers in advance, none of which has the environment that actors need."""
RAYLET_S, LOOK_S = 30.0, 0.02
"""Seconds in which a raylet is there, as Ray allows, and between looks at whether it is."""
PATH_BYTES = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Bytes that Linux leaves to the path of the temporary folder, as it takes 107 as that of a socket."""
DIED = "A worker died or was killed while executing a task"
"""Beginning of what Ray prints of a dead worker."""
IN_USE = threading.Lock()
"""Held by the run of this process, also while Ray starts, which may take seconds."""
TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@contextmanager
def running(config: ClusterConfig, *, num_devices: int) -> Iterator[None]:
    """Runs Ray inside the `with` block. A Ray that was started here ends with the block; a joined one continues.

    A Ray started here listens on the loopback interface only and requires a token that is created for this program,
    unless the environment sets either differently. A joined one keeps its token.

    Args:
        num_devices: least number of CPU slots of a local Ray; a laptop may have more ranks than cores. There is also a
            slot for each core this process may use, because Ray starts as many workers at a time as slots.

    Raises:
        ConfigError: no cluster answers at the address, Ray does not start here, or this process uses it already.
    """
    # Ray would otherwise hide the accelerators from actors that request none, and warn at each start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    # Ray connects at any call, so that a thread which outlives the block, such as a look at a machine that does not
    # answer, would connect again, and the next `ray.init` fail. Ray reads RAY_ENABLE_AUTO_CONNECT only when imported.
    auto_init_hook.enable_auto_connect = False
    address, environment = config.joins, config.runtime_env.for_ray()
    with (
        one_at_a_time(),
        without_deaths(),
        nullcontext() if address else closed_to_others(),
        nullcontext() if address else known(),
    ):
        with keeping_handlers():
            if address:
                join(address, environment)
            else:
                start(environment, num_cpus=max(num_devices, len(os.sched_getaffinity(0))))
        try:
            yield
        finally:
            leave()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keeps every other run of this process from Ray until the end of the `with` block.

    Raises:
        ConfigError: this process uses Ray already.
    """
    if ray.is_initialized() or not IN_USE.acquire(blocking=False):
        said = (
            "this process is connected to Ray already, by another run or by ray.init, and may be so once: wait for the "
            "run, call ray.shutdown() before it, or begin it in a process of its own"
        )
        raise ConfigError([Fault("cluster.address", said=said)])
    try:
        yield
    finally:
        IN_USE.release()


def leave() -> None:
    """Leaves Ray, as soon as no look at other machines waits for it; see `ASKING`."""
    alone = ASKING.acquire(timeout=2 * REMOTE_S)
    try:
        ray.shutdown()
    finally:
        if alone:
            ASKING.release()


def start(environment: dict[str, Any], *, num_cpus: int) -> None:
    """Starts Ray on this machine, whose workers get `environment`.

    Raises:
        ConfigError: it did not start in the time that Ray gives itself, or its temporary folder cannot hold its files.
    """
    with alone(), noticed(), inherited(), forking():
        try:
            ray.init(
                address=LOCAL,
                runtime_env=environment,
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except OSError as error:
            # A path that is too long for a socket is a plain OSError, what else is wrong with a file names it.
            if type(error) is not OSError and error.filename is None:
                raise
            folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
            said = (
                f"Ray cannot keep its files and sockets in {folder} ({error}); set RAY_TMPDIR to a folder that can be "
                f"written to, with a path of at most {PATH_BYTES} bytes, such as /tmp"
            )
            raise ConfigError([Fault("RAY_TMPDIR", said=said)]) from error
        except Exception as error:
            # Ray 2.60 raises a plain Exception after 30 s, which no setting changes; other classes are other faults.
            if type(error) is not Exception:
                raise
            said = (
                f"Ray did not start on this machine ({error}); look with `top` for what keeps it busy and start the "
                "same command again, or start Ray before the run with `ray start --head` and set cluster.address=auto"
            )
            raise ConfigError([Fault("cluster.address", said=said)]) from error


def join(address: str, environment: dict[str, Any]) -> None:
    """Connects to the Ray cluster at `address`, whose workers get `environment`.

    Raises:
        ConfigError: no cluster answers there.
    """
    if reason := refusal(address):
        raise ConfigError(
            [
                Fault(
                    "cluster.address",
                    said=f"nothing listens at {address!r} ({reason}); start Ray there with `ray start --head`",
                )
            ]
        )
    try:
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(
            [
                Fault(
                    "cluster.address",
                    said=f"no Ray cluster answers at {address!r} ({error}); start one with `ray start "
                    "--head`, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN if the cluster requires a token",
                )
            ]
        ) from error
    # A cluster that requires a token would have refused.
    if get_authentication_mode() != AuthenticationMode.TOKEN:
        logger.warning(
            "cluster.address: the Ray cluster at %s requires no token, so anyone who reaches its ports "
            "can run code as its user; start each of its nodes with RAY_AUTH_MODE=token "
            "and the same token (`ray get-auth-token --generate`), and set both for this run too",
            address,
        )


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Makes processes started inside the `with` block listen on the loopback interface, and Ray require a token."""
    wanted = LOOPBACK | NO_PRESTART
    if not any(name in os.environ for name in TOKENS):
        wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token()}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ |= added
    # The mode was read when Ray was imported; Ray 2.60 sets it in the same way when it creates a token itself.
    Config.initialize("")
    before = ray_constants.ENABLE_RAY_CLUSTER
    # Ray 2.60 reads the variable when it is imported, which has happened already.
    ray_constants.ENABLE_RAY_CLUSTER = os.environ[CLUSTERS] != "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def alone() -> Iterator[None]:
    """Keeps a Ray that is started inside the `with` block from starting the processes of UNREAD, and the raylet's agent
    from importing what it serves to a dashboard, for which the raylet waits.

    Workaround for Ray 2.60, whose `ray.init` starts them whatever its arguments are; `include_dashboard=False` leaves
    the dashboard's server running without its pages, and the agent with all its modules.
    """
    before = {name: getattr(Node, name) for name in UNREAD if hasattr(Node, name)}
    dependencies = utils.get_dashboard_dependency_error
    for name in before:
        setattr(Node, name, _nothing)
    # The agent is then started as where only a part of Ray is installed.
    utils.get_dashboard_dependency_error = _no_dashboard
    try:
        yield
    finally:
        utils.get_dashboard_dependency_error = dependencies
        for name, method in before.items():
            setattr(Node, name, method)


@contextmanager
def noticed() -> Iterator[None]:
    """Makes a Ray that is started inside the `with` block go on as soon as its only raylet is there.

    Workaround for Ray 2.60, which looks once a second. Not needed any more once `Node.__init__` returns within a tenth
    of a second after the raylet has registered.
    """
    start_processes = Node.start_ray_processes

    def start_and_wait(self: Node) -> None:
        start_processes(self)
        client, deadline = self.get_gcs_client(), time.monotonic() + RAYLET_S
        # Ray says what is wrong with one that does not come.
        while client and not client.get_all_node_info() and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    Node.start_ray_processes = start_and_wait
    try:
        yield
    finally:
        Node.start_ray_processes = start_processes


@contextmanager
def without_deaths() -> Iterator[None]:
    """Keeps Ray from printing of dead workers inside the `with` block. A run tells of those that it has not ended
    itself, by name and with their logs.

    Workaround for Ray 2.60, which at times takes a worker that `ray.kill` ends for one that died, and says so after a
    run that went well. Not needed any more once no run of several that end well prints it.
    """
    before = worker.print_to_stdstream

    def print_others(data: dict[str, Any], *arguments: Any, **named: Any) -> None:
        if not any(line.startswith(DIED) for line in data["lines"]):
            before(data, *arguments, **named)

    worker.print_to_stdstream = print_others
    try:
        yield
    finally:
        worker.print_to_stdstream = before


def _no_dashboard() -> ImportError:
    """Returns why the modules of the dashboard cannot be imported."""
    return ImportError("nobody reads a dashboard")


def _nothing(*_: object, **__: object) -> None:
    """Starts no process, and sets no handler."""


@cache
def token() -> str:
    """Returns the token of processes started by this program: one for all, because Ray reads it once per process."""
    return secrets.token_hex(32)


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Keeps this process's handlers of SIGTERM and SIGINT in a `with` block that starts Ray, and after it.

    Workaround for Ray 2.60, which first replaces that of SIGTERM by one that ends the process without a word, and
    later, below Python, by one that writes a crash dump (https://github.com/ray-project/ray/issues/37288). Not needed
    any more once `signal.getsignal(SIGTERM)` is unchanged in `ray.init`, and a signal after it writes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = _nothing
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
