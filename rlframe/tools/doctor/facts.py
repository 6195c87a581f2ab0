"""Facts of a machine, as data: any machine's facts can be judged anywhere."""

from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU."""

    name: str
    memory_gib: float
    capability: tuple[int, ...]
    """Compute capability, such as (9, 0). Empty if it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """The GPUs and their driver."""

    devices: tuple[Device, ...] = ()
    driver: str = ""
    """Release of the driver. Empty if there is none."""
    error: str = ""
    """The error of asking the driver. Empty if there was none."""
    without_peer_access: tuple[str, ...] = ()
    """Pairs of GPUs that cannot read each other's memory, such as `0-1`."""
    torch_cuda: str = ""
    """Release of CUDA that torch is built for. Empty if it is built for CPUs, or missing."""
    headers: tuple[str, ...] = ()
    """The headers of cuDNN and NCCL that a compiler would find: of `cudnn.h` and `nccl.h`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A limit of processes. None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """The machine and its kernel."""

    host: str = ""
    platform: str = ""
    python: str = ""
    cores: int = 1
    memory_gib: float = 0.0
    shm_gib: float = 0.0
    """Size of /dev/shm."""
    limits: dict[str, Limit] = field(default_factory=dict)
    """By name: nofile, memlock, nproc."""
    has_infiniband: bool = False
    ephemeral_ports: int = 0
    """Number of ports that the kernel gives out."""
    is_clock_kept: bool | None = None
    """Whether a service keeps the clock right. None if it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The disk of a folder."""

    folder: str = ""
    free_gib: float = 0.0
    mib_per_s: float | None = None
    """Speed of writing. None if nothing could be written."""
    error: str = ""
    marks: tuple[str, ...] = ()
    """Names of files that other nodes have put in the folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """The hub of models and data, and its cache."""

    cache: str = ""
    is_writable: bool = True
    is_offline: bool = False
    endpoint: str = ""
    is_asked: bool = False
    """Whether the endpoint was asked: not where nothing shall be, and not behind a proxy."""
    error: str = ""
    """The error of reaching the endpoint. Empty if it was reached, or not asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ray:
    """The settings of Ray."""

    address: str = ""
    """RAY_ADDRESS, or that of the cluster to which a node belongs that was asked."""
    auth_mode: str = ""
    """RAY_AUTH_MODE."""
    has_token: bool = False
    is_running: bool = False
    """Whether something listens at Ray's port 6379 of this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that is known of a machine."""

    packages: dict[str, str] = field(default_factory=dict)
    """Releases of installed packages by the names of `stack.PACKAGES`."""
    gpus: Gpus = Gpus()
    system: System = System()
    disk: Disk = Disk()
    hub: Hub = Hub()
    ray: Ray = Ray()
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that libraries on all nodes must agree on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something to mend."""

    what: str
    """A sentence with the fact and why it matters."""
    mend: str
    """The commands that mend it, one a line; where there are several, any of them."""
    is_problem: bool = True
    """Whether runs fail with it. Otherwise they may, or are slow."""
    node: str = ""
    """The node of a cluster. Empty for this machine."""


def warning(what: str, mend: str, *, node: str = "") -> Finding:
    """Returns a finding that may hurt."""
    return Finding(what=what, mend=mend, is_problem=False, node=node)
