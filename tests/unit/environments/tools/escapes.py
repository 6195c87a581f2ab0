"""Ways out of a sandbox, as code that a policy could write. What gets out writes ESCAPED."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Escape:
    """One way out."""

    name: str
    code: str
    """Code that may name `PORT`, `PORT_OF_DATAGRAMS`, `SOCKET`, `ABSTRACT`, `SECRET`, `SESSION`, `HOME` and `PREFIX`, of
    what lies outside."""
    told: str
    """Part of what the policy reads."""
    plain: bool = False
    """Whether a plain process gets out, which shows that the code is right."""


def tried(*lines: str) -> str:
    """Code that tries each line by itself, and prints why it failed."""
    attempts = "\n".join(
        f"try:\n    {line}\nexcept Exception as error:\n    print(type(error).__name__)" for line in lines
    )
    return f"import os, socket, sys, ctypes, mmap\n{attempts}"


LIBC = "libc = ctypes.CDLL(None, use_errno=True)"
ESCAPES = [
    Escape(
        name="TCP",
        code=tried("socket.create_connection(('127.0.0.1', PORT), timeout=2); print('ESCAPED')"),
        told="PermissionError",
        plain=True,
    ),
    Escape(
        name="UDP",
        code=tried(
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT_OF_DATAGRAMS)); print('ESCAPED')"
        ),
        told="PermissionError",
        plain=True,
    ),
    Escape(name="DNS", code=tried("print('ESCAPED', socket.getaddrinfo('example.org', 80))"), told="gaierror"),
    Escape(
        name="unix socket with a path",
        code=tried("socket.socket(socket.AF_UNIX).connect(SOCKET); print('ESCAPED')"),
        told="FileNotFoundError",
        plain=True,
    ),
    Escape(
        name="unix socket without a path",
        code=tried("socket.socket(socket.AF_UNIX).connect(ABSTRACT); print('ESCAPED')"),
        told="ConnectionRefusedError",
        plain=True,
    ),
    Escape(
        name="sockets of other families (vsock, netlink, packet, crypto)",
        code=tried(
            *(
                f"socket.socket({family}, {kind}); print('ESCAPED')"
                for family, kind in ((40, 1), (16, 3), (17, 3), (38, 5))
            )
        ),
        told="PermissionError\nPermissionError\nPermissionError\nPermissionError",
        plain=True,
    ),
    Escape(
        name="other files",
        code=tried(
            "print('ESCAPED', open('/etc/shadow').read())",
            "print('ESCAPED', open('/etc/passwd').read())",
            "print('ESCAPED', open(SECRET).read())",
            "print('ESCAPED', [each for each in os.listdir(HOME) if each != '.pyenv'][0])",
        ),
        told="FileNotFoundError\nFileNotFoundError\nFileNotFoundError\n",
        plain=True,
    ),
    Escape(
        name="environment",
        code="import os; print('ESCAPED' if 'SECRET_OF_SESSION' in os.environ else sorted(os.environ))",
        told="['HOME', 'LC_CTYPE', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PWD']",
    ),
    Escape(
        name="environment of other processes",
        code=tried(
            "print('ESCAPED') if b'SECRET_OF_SESSION' in open(f'/proc/{SESSION}/environ', 'rb').read() else None",
            "print('ESCAPED') if b'SECRET_OF_SESSION' in open('/proc/1/environ', 'rb').read() else print('empty')",
        ),
        told="FileNotFoundError\n",
    ),
    Escape(
        name="other processes in /proc",
        code="import os; found = [each for each in os.listdir('/proc') if each.isdigit()]\n"
        "print('ESCAPED' if len(found) > 2 else len(found))",
        told="2",
        plain=True,
    ),
    Escape(
        name="descriptors of the session",
        code="import os\nfor each in range(3, 1024):\n    try:\n        os.fstat(each); print('ESCAPED', each)\n"
        "    except OSError: pass\nprint(os.read(0, 10), 'nothing')",
        told="b'' nothing",
    ),
    Escape(
        name="memory and descriptors of the sandbox's first process",
        code=tried(
            LIBC,
            "os.close(os.open('/proc/1/fd/0', os.O_RDWR)); print('fd 0')",
            "print('ESCAPED', libc.ptrace(16, 1, 0, 0)) if libc.ptrace(16, 1, 0, 0) == 0 else print('no ptrace')",
            "print('filtered') if 'Seccomp:\\t2' in open('/proc/1/status').read() else print('ESCAPED')",
        ),
        told="no ptrace\nfiltered",
    ),
    Escape(
        name="writing outside",
        code=tried(
            *(
                f"open({folder} + '/escaped', 'w').close(); print('ESCAPED', {folder})"
                for folder in (
                    "'/'",
                    "'/usr'",
                    "'/usr/bin'",
                    "'/etc'",
                    "'/dev'",
                    "'/proc'",
                    "PREFIX",
                    "HOME",
                )
            ),
            "open('/proc/sys/kernel/hostname', 'wb', 0).write(b'x'); print('ESCAPED')",
            "open('/proc/sysrq-trigger', 'wb', 0).write(b'h'); print('ESCAPED')",
            "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000'); print('ESCAPED')",
            "open(sys.executable, 'r+b'); print('ESCAPED')",
            "print('written') if open('/tmp/inside', 'w').write('x') else None",
        ),
        told="written",
    ),
    Escape(
        name="links out",
        code=tried(
            "os.symlink('/proc/1/' 'root/etc/shadow', 'a'); print('ESCAPED', open('a').read())",
            "print('ESCAPED', open('/tmp/../../../../etc/shadow').read())",
            "print('ESCAPED', open('/proc/self/' 'root/../etc/shadow').read())",
            "print('ESCAPED', os.listdir('/proc/1/cwd/oldroot'))",
            "os.symlink(SECRET, 'b'); print('ESCAPED', open('b').read())",
            "os.link('/usr/bin/env', '/tmp/env'); print('ESCAPED')",
        ),
        told="Error",
    ),
    Escape(
        name="devices",
        code=tried(
            "open('/dev/mem', 'rb'); print('ESCAPED')",
            "open('/dev/kmsg'); print('ESCAPED')",
            "open('/dev/tty', 'rb'); print('ESCAPED')",
            "os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0)); print('ESCAPED')",
            "print(sorted(os.listdir('/dev')))",
        ),
        told="['fd', 'full', 'null', 'random', 'shm', 'urandom', 'zero']",
    ),
    Escape(
        name="ptrace",
        code=tried(
            LIBC,
            "print('ESCAPED') if libc.ptrace(0, 0, 0, 0) == 0 else print('errno', ctypes.get_errno())",
            "print('ESCAPED') if libc.syscall(310, SESSION, 0, 0, 0, 0, 0) == 0 else print('errno', ctypes.get_errno())",
        ),
        told="errno 1\nerrno 1",
        plain=True,
    ),
    Escape(
        name="mounting, and namespaces of one's own",
        code=tried(
            LIBC,
            "print('ESCAPED') if libc.unshare(0x10000000) == 0 else print('errno', ctypes.get_errno())",
            "print('ESCAPED') if libc.unshare(0x10020000) == 0 else print('errno', ctypes.get_errno())",
            "print('ESCAPED') if libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0 else print('errno', ctypes.get_errno())",
            "print('ESCAPED') if libc.umount2(b'/tmp', 2) == 0 else print('errno', ctypes.get_errno())",
            "print('ESCAPED') if libc.syscall(56, 0x10000011, 0, 0, 0, 0) >= 0 else print('errno', ctypes.get_errno())",
            "os.chroot('/tmp'); print('ESCAPED')",
        ),
        told="errno 1\nerrno 1\nerrno 1\nerrno 1\nerrno 1\nPermissionError",
    ),
    Escape(
        name="becoming root",
        code=tried(
            "os.setuid(0); print('ESCAPED')",
            "os.setresuid(0, 0, 0); print('ESCAPED')",
            "os.setgroups([0]); print('ESCAPED')",
            "import subprocess; print('ESCAPED') if b'uid=0' in subprocess.run(['su', '-c', 'id'], capture_output=True).stdout else None",
            "print([line.split()[1] for line in open('/proc/self/status') if line[:7] in ('CapEff:', 'CapPrm:', 'NoNewPr')])",
        ),
        told="['0000000000000000', '0000000000000000', '1']",
    ),
    Escape(
        name="signals to others",
        code=tried(
            # Nothing is sent with 0: the kernel only says whether it would be.
            "os.kill(SESSION, 0); print('ESCAPED')",
            "os.killpg(SESSION, 0); print('ESCAPED')",
            "os.kill(-1, 0); print('ESCAPED')",
            "os.setpriority(os.PRIO_PROCESS, SESSION, 19); print('ESCAPED')",
            "print('goes on')",
        ),
        told="goes on",
    ),
]
FORKS = """
import os, time
children = 0
try:
    while children < 200:
        if os.fork() == 0:
            time.sleep(60)
        children += 1
    print("ESCAPED")
except BlockingIOError as error:
    print(type(error).__name__, children)
"""
LIMITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fork bomb": (FORKS, {}, "BlockingIOError 15"),
    "thread bomb": (
        "import threading, time\nmade = 0\ntry:\n    while made < 200:\n"
        "        threading.Thread(target=time.sleep, args=(1,)).start(); made += 1\n"
        "    print('ESC''APED')\nexcept RuntimeError: print('made', made)",
        {"memory_mb": 2048},
        "made 15",
    ),
    "memory bomb": ("x = bytearray(600 << 20); print('ESC''APED')", {}, "MemoryError"),
    "memory bomb in shared memory": (
        "import mmap\nx = mmap.mmap(-1, 600 << 20); print('ESC''APED')",
        {},
        "Cannot allocate memory",
    ),
    "memory bomb of many processes": (
        "import os, time\nfor _ in range(2): os.fork()\nx = bytearray(200 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\n"
        "time.sleep(60); print('ESC''APED')",
        {},
        "used more than 512 MiB of memory",
    ),
    "memory bomb of files without names": (
        "import os\ntry: os.memfd_create('x'); print('ESC''APED')\nexcept OSError as error: print(error)\n"
        "import ctypes\nprint(ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600))",
        {},
        "Operation not permitted\n-1",
    ),
    "memory and files together": (
        "import time\nx = bytearray(90 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nfile = open('a', 'wb')\n"
        "for _ in range(60): file.write(x[: 1 << 20])\ntime.sleep(60); print('ESC''APED')",
        {"memory_mb": 150},
        "used more than 150 MiB of memory",
    ),
    "endless output": ("while True: print('x' * 1000)", {"output_kb": 64}, "wrote more than 65536 bytes"),
    "endless output without lines": (
        "import os\nwhile True: os.write(2, b'x' * 65536)",
        {},
        "wrote more than 1048576 bytes",
    ),
    "endless work": ("while True: pass", {"cpu_s": 1, "timeout_s": 60.0}, "used a processor for more than 1 s"),
    "endless work, deaf to signals": (
        "import signal\nfor each in range(1, 32):\n    try: signal.signal(each, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        {"cpu_s": 1, "timeout_s": 60.0},
        "ended by SIGKILL",
    ),
    "endless sleep": ("import time; time.sleep(1000)", {"timeout_s": 3.0}, "took longer than 3 s"),
    "huge file": ("open('a', 'wb').write(bytes(100 << 20)); print('ESC''APED')", {}, "Error"),
    "huge file with a hole": ("open('a', 'wb').truncate(1 << 40); print('ESC''APED')", {}, "File too large"),
    "many large files": (
        "for i in range(20): open(str(i), 'wb').write(bytes(10 << 20))\nprint('ESC''APED')",
        {},
        "No space left on device",
    ),
    "many files": (
        "for i in range(1_000_000): open(str(i), 'w').close()\nprint('ESC''APED')",
        {"timeout_s": 60.0},
        "more than 1000 files",
    ),
    "many folders": (
        "import os\nfor i in range(1_000_000): os.mkdir('a'); os.chdir('a')",
        {"timeout_s": 60.0},
        "more than 1000 files",
    ),
    "many open files": (
        "kept = [open('/dev/null') for _ in range(1000)]; print('ESC''APED')",
        {},
        "Too many open files",
    ),
    "raising the limits again": (
        "import resource\nfor each in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):\n"
        "    try: resource.setrlimit(each, (-1, -1)); print('ESC''APED')\n    except (OSError, ValueError) as error: print('no')",
        {},
        "no\nno\nno\nno",
    ),
    "deep recursion": ("def f(): f()\nf()", {}, "RecursionError"),
    "crash": ("import ctypes; ctypes.string_at(0)", {}, "ended by SIGSEGV"),
}
"""Code that needs too much, the settings of its call, and part of what the policy reads."""
