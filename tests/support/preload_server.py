"""A process that has imported what this project imports, and forks the processes of the tests.

preload.py starts it and speaks with it. A fork has the command line, environment, directory and
standard streams that a new process would have, and runs the program as `__main__`; only starting
Python and importing the libraries is left out. Nothing of the program or of a library is replaced,
but for one thing: where the program is `accelerate launch`, it forks its workers too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = "accelerate.commands.launch"
MODULES = ("snapshot", LAUNCHER)
"""What `python -m` may run in a fork, beside the scripts of this project."""
IMPORTED = (
    *("torch._dynamo", "torch.distributed.run", "torch.distributed.fsdp"),
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.algorithms.ddp_comm_hooks",
    *("hydra.core.plugins", "hydra._internal.core_plugins.basic_launcher"),
    *("hydra._internal.core_plugins.basic_sweeper", "hydra._internal.core_plugins.bash_completion"),
    *("hydra._internal.core_plugins.fish_completion", "importlib.resources.readers"),
    *("hydra._internal.core_plugins.zsh_completion", "matplotlib.backends.backend_agg"),
    *("hydra._internal.core_plugins.file_config_source", "matplotlib.figure"),
    "hydra._internal.core_plugins.importlib_resources_config_source",
    "hydra._internal.core_plugins.structured_config_source",
    *("pandas", "pyarrow.parquet", "numpy.ctypeslib", LAUNCHER, "datasets", "train", "sample"),
    *("plan", "snapshot.__main__"),
)
"""What a run imports, sooner or later."""
READ_LATER = (
    *("ACCELERATE_DYNAMO_", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION"),
    *("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"),
    *("ACCELERATE_USE_PARALLELISM_CONFIG", "CUDA_VISIBLE_DEVICES", "FSDP_", "GLOO_", "GROUP_"),
    "KMP_",  # LLVM's and Intel's OpenMP read them, where torch has been built with those
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "NCCL_", "NO_PROXY", "PARALLELISM_CONFIG_"),
    *("PET_", "PYTEST_", "RANK", "ROLE_", "SLURM_", "TORCHELASTIC_", "TORCH_ELASTIC_"),
    *("TORCH_NCCL_", "WORLD_SIZE"),
)
"""How the names begin of variables that nothing reads while it is imported: a test sees to it."""
ROOM = "PRELOAD_ROOM"
"""A long variable, and a long last argument: in their place a fork shows its own in /proc."""
EXECUTE = inspect.signature(subprocess.Popen._execute_child)


def can_be_forked(words: list[str]) -> bool:
    """Whether a command is this Python with a script of this project, or a module of MODULES."""
    if words[0] != sys.executable:
        return False
    program = _program(words)
    if program[0] == "-m":
        return program[1] in MODULES
    path = Path(program[0])
    return path.suffix == ".py" and path.resolve().is_relative_to(ROOT)


def read_in_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an import may have read: a fork has those of the server.

    A variable that this file does not know is one of them.
    """
    return {k: v for k, v in environment.items() if not k.startswith(READ_LATER) and k != ROOM}


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork on request, until nobody can ask any more. Returns in the forks, with the request."""
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return watched(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)


def preload() -> None:
    """Import, and keep the garbage collector from writing into pages that the forks share."""
    for name in IMPORTED:
        importlib.import_module(name)
    sys.modules.pop("snapshot.__main__", None)  # or `python -m snapshot` would warn
    gc.collect()
    gc.freeze()


def watched(request: dict[str, Any], fd: int, *streams: int) -> dict[str, Any]:
    """Fork the process, report its number and its end. Returns in the fork, with the request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line = socket.socket(fileno=fd)
    if (pid := os.fork()) == 0:
        if request["session"]:
            os.setsid()
        line.send(str(os.getpid()).encode())
        line.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return request
    for stream in streams:
        os.close(stream)
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    with contextlib.suppress(OSError):  # the tests may have ended
        line.send(str(code).encode())
        line.recv(1)  # its number is its own until they have seen the end
    os._exit(0)


def become(words: list[str], environment: dict[str, str], directory: str) -> NoReturn:
    """Be the process of a command, from its first line to its exit code."""
    program = _program(words)
    reset_signals()
    os.chdir(directory)
    set_environment(environment)
    show_in_proc(words, environment)
    sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]  # not that of the other forks
    sys.orig_argv = list(words)
    open_streams(unbuffered=words[1] == "-u")
    code = 1
    try:
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], directory
            if program[1] == LAUNCHER:
                _have_workers_forked()
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = program, str(Path(program[0]).resolve().parent)
            runpy.run_path(program[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    # As Python itself ends: waits for threads, runs what is registered for the exit, flushes.
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("not reached")


def open_streams(unbuffered: bool) -> None:
    """The standard streams as Python opens them: they remember whether there is a way back in them.

    In the same objects, because handlers of log messages have them since the imports.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        now = unbuffered or stream.write_through  # type: ignore[attr-defined]
        buffer = open(number, "wb", 0 if now else -1, closefd=False)  # noqa: SIM115
        lines = number == 2 and not now
        stream.__init__(buffer, stream.encoding, stream.errors, "\n", lines, now)  # type: ignore


def set_environment(environment: Mapping[str, str]) -> None:
    """Exactly this, for Python and C."""
    os.environ.clear()
    os.environ.update(environment)


def reset_signals() -> None:
    """As Python starts with them, whatever the server, or a launcher, has set."""
    signal.set_wakeup_fd(-1)
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def show_in_proc(words: list[str], environment: Mapping[str, str]) -> None:
    """Have /proc/<pid>/cmdline and environ tell this process's own, as ps and psutil read them.

    A run finds its launcher by the parent's command line. Nothing else reads those bytes: Python
    has copied its arguments, and the C library's environment has been set anew.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assignments = [f"{name}={value}" for name, value in environment.items()]
    for first, strings in ((48, words), (50, assignments)):  # as proc_pid_stat(5) counts them
        start, end = int(fields[first - 3]), int(fields[first - 2])
        content = b"".join(os.fsencode(one) + b"\0" for one in strings)
        assert len(content) <= end - start, f"{len(content)} bytes, room for {end - start}"
        ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


class ForkingPopen(subprocess.Popen):
    """subprocess.Popen of a launcher that has been forked: its workers are forks of it."""

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        given = EXECUTE.bind(self, *arguments, **named).arguments
        words = [os.fspath(word) for word in given["args"]]
        environment = dict(os.environ if given["env"] is None else given["env"])
        piped = any(number != -1 for name, number in given.items() if name[:3] in ("p2c", "c2p"))
        same = read_in_imports(environment) == read_in_imports(os.environ)
        if piped or given["errwrite"] != -1 or not same or not can_be_forked(words):
            return super()._execute_child(*arguments, **named)  # type: ignore[misc]
        self.pid = os.fork()
        if self.pid == 0:
            if given["start_new_session"]:
                os.setsid()
            _let_go_of_files()
            become(words, environment, os.fspath(given["cwd"] or Path.cwd()))
        self._child_created = True
        return None


def _let_go_of_files() -> None:
    """Those of the launcher, but keep their numbers: an object of its own may still close them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            if int(name) > 2 and int(name) != nothing and os.fstat(int(name)):
                os.dup2(nothing, int(name), inheritable=False)


def _have_workers_forked() -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    subprocess_handler.Popen = ForkingPopen  # type: ignore[attr-defined]


def _program(words: list[str]) -> list[str]:
    """The program with its arguments, without Python's own -u: '-m name ...' or 'path ...'."""
    return words[2:] if words[1] == "-u" else words[1:]


def main() -> None:
    """Import, and answer on the socket whose number is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; they then hang up
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    sys.path[0] = str(ROOT)
    preload()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    become(request["words"], request["environment"], request["directory"])


if __name__ == "__main__":
    main()
