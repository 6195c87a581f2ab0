"""Faults in tools: limits of the sandbox that do not hold, ways out of it, searches and servers."""

from tests.mutations.mutation import Mutation, faults

TOOLS = "tests/unit/environments/tools"
LIMITS = f"{TOOLS}/test_escapes.py::test_what_needs_too_much_is_ended"
ESCAPES = f"{TOOLS}/test_escapes.py::test_no_code_gets_out"
LEFT = f"{TOOLS}/test_escapes.py::test_nothing_that_the_code_has_started_survives_it"
PYTHON = f"{TOOLS}/test_python.py"
SANDBOX = "rlframe/environments/tools/sandbox"

MUTATIONS: list[Mutation] = [
    *faults(
        f"{SANDBOX}/inside.py",
        LIMITS,
        ("memory of one process has no limit", 'lower(resource.RLIMIT_AS, settings["memory_bytes"])', "pass"),
        ("processors may be used for ever", 'settings["cpu_s"], settings["cpu_s"] + 1)', "-1)"),
        (
            "code may go on after the signal of its processor limit",
            'settings["cpu_s"], settings["cpu_s"] + 1)',
            'settings["cpu_s"], resource.RLIM_INFINITY)',
        ),
        ("a file may have any size", 'lower(resource.RLIMIT_FSIZE, settings["file_bytes"])', "pass"),
        ("any number of files may be open", "lower(resource.RLIMIT_NOFILE, OPEN_FILES)", "pass"),
        ("the number of processes has no limit", "lower(resource.RLIMIT_NPROC, processes)", "pass"),
        (
            "limits can be raised again",
            "resource.setrlimit(kind, (min(value, hard), hard))",
            "resource.setrlimit(kind, (min(value, hard), most))",
        ),
    ),
    *faults(
        f"{SANDBOX}/inside.py",
        ESCAPES,
        ("code stays root", "os.setresuid(user, user, user)", "pass"),
    ),
    *faults(
        f"{SANDBOX}/running.py",
        LIMITS,
        ("a call may take for ever", "asyncio.timeout(self._limits.timeout_s)", "asyncio.timeout(60.0)"),
        ("output has no limit", "elif len(self._output) > self._limits.output_bytes + len(BEGUN):", "elif False:"),
        ("the number of files has no limit", "if files > self._limits.files:", "if False:"),
        ("memory of all processes together has no limit", "if memory > self._limits.memory_bytes:", "if False:"),
        ("files do not count as memory", "memory += file_bytes", "pass"),
    ),
    *faults(
        f"{SANDBOX}/running.py",
        PYTHON,
        (
            "a program that is given up goes on",
            "            watch.cancel()\n            self._release()",
            "            watch.cancel()",
        ),
        ("a sandbox that fails is an answer", "if not output.startswith(BEGUN):", "if False:"),
    ),
    *faults(
        f"{SANDBOX}/box.py",
        ESCAPES,
        ("code has the session's network", '"--unshare-net", ', ""),
        ("code sees all processes", '"--unshare-pid", ', ""),
        ("code has any system call", '"--clearenv", "--seccomp", str(descriptor)]', '"--clearenv"]'),
        ("code sees configuration of the machine", '"--ro-bind-try", path, path]', '"--ro-bind-try", "/etc", "/etc"]'),
    ),
    *faults(
        f"{SANDBOX}/box.py",
        LEFT,
        ("what code has started lives on", '"--die-with-parent", ', ""),
    ),
    *faults(
        f"{SANDBOX}/box.py",
        LIMITS,
        ("the folder of a sandbox has no limit", '"--size", str(self._limits.file_bytes), ', ""),
    ),
    *faults(
        f"{SANDBOX}/box.py",
        PYTHON,
        (
            "a sandbox that does not work is found out by the policy",
            'if (ended.output, ended.exit_code) != ("42\\n", 0):',
            "if False:",
        ),
        (
            "programs of root stay root's without a sandbox",
            "self._as_root = os.geteuid() == 0",
            "self._as_root = kind is Kind.BUBBLEWRAP and os.geteuid() == 0",
        ),
    ),
    *faults(
        f"{SANDBOX}/filter.py",
        LIMITS,
        ("the filter lets all calls pass", "lines += _if((EQUAL, value), NOT_PERMITTED)", "pass"),
    ),
    *faults(
        f"{SANDBOX}/filter.py",
        ESCAPES,
        (
            "the filter lets namespaces pass by clone",
            "_if((ANY_BIT, NAMESPACES), NOT_PERMITTED)",
            "_if((ANY_BIT, 0), NOT_PERMITTED)",
        ),
        ("the filter lets all sockets pass", "(EQUAL, 1, 0, LOCAL_SOCKET)", "(EQUAL, 1, 1, LOCAL_SOCKET)"),
    ),
    *faults(
        "rlframe/environments/tools/python.py",
        PYTHON,
        ("any number of calls run at the same time", "asyncio.Semaphore(config.parallel)", "asyncio.Semaphore(1000)"),
        ("code has any length", "if len(code) > LONGEST_CODE:", "if False:"),
    ),
    *faults(
        "rlframe/environments/tools/search.py",
        f"{TOOLS}/test_search.py",
        ("a search returns all documents", "[:top_k]", ""),
        ("the worst documents come first", "np.argsort(-scores", "np.argsort(scores"),
        ("documents without a word of the query are found", "if scores[number] > 0]", "]"),
        ("a long document is cut at its beginning", "return text[best : best + most]", "return text[:most]"),
    ),
    *faults(
        "rlframe/environments/tools/mcp.py",
        f"{TOOLS}/test_mcp.py",
        ("a server is started again for ever", "if self._restarts:", "if False:"),
        ("a server that has ended stays", "if self._client is client:", "if False:"),
        ("all tools of a server are offered", "return not config.functions or name in config.functions", "return True"),
        (
            "every session has a connection of its own",
            "self._of_process() if self._config.connection is Scope.PROCESS else",
            "self._of_process() if False else",
        ),
        ("errors of a server are answers", "if result.is_error:", "if False:"),
    ),
]
