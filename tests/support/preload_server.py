"""A process that has imported what this project imports, and forks the processes of the tests.

preload.py starts it and speaks with it. A fork is given the command line, environment, directory
and standard streams that a new process would have had, and runs the program as `__main__`; only
starting Python and importing the libraries is left out. Nothing of the program or of a library is
replaced, but for one thing: where the program is `accelerate launch`, it forks its workers too.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = "accelerate.commands.launch"
MODULES = ("snapshot", LAUNCHER)
"""What `python -m` may run in a fork, beside the scripts of this project."""

# In two stages, because huggingface_hub reads the address of the Hub when it is imported.
FIRST = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "numpy.ctypeslib",
    "pandas",
    "pyarrow.parquet",
    "hydra.core.plugins",
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.basic_sweeper",
    "hydra._internal.core_plugins.bash_completion",
    "hydra._internal.core_plugins.fish_completion",
    "hydra._internal.core_plugins.zsh_completion",
    "hydra._internal.core_plugins.file_config_source",
    "hydra._internal.core_plugins.importlib_resources_config_source",
    "hydra._internal.core_plugins.structured_config_source",
    "importlib.resources.readers",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PpmImagePlugin",
)
THEN = (
    "accelerate",
    LAUNCHER,
    "datasets",
    "train",
    "sample",
    "plan",
    "snapshot.__main__",
)
READ_LATER = (
    "ACCELERATE_DYNAMO_",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "FSDP_",
    "GLOO_",
    "GROUP_",
    "KMP_",  # LLVM's and Intel's OpenMP read them, where torch has been built with those
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "NCCL_",
    "NO_PROXY",
    "PARALLELISM_CONFIG_",
    "PET_",
    "PYTEST_",
    "RANK",
    "ROLE_",
    "SLURM_",
    "TORCHELASTIC_",
    "TORCH_ELASTIC_",
    "TORCH_NCCL_",
    "WORLD_SIZE",
)
"""How the names begin of variables that nothing reads while it is imported: a test sees to it."""
OF_THE_HUB = "HF_"
"""How the names begin of variables that only the second stage's imports read."""
ROOM = "PRELOAD_ROOM"
"""A long variable, and a long last argument: in their place a fork shows its own in /proc."""

EXECUTE = inspect.signature(subprocess.Popen._execute_child)


def can_be_forked(words: list[str]) -> bool:
    """Whether a command is this Python with a script of this project, or a module of MODULES."""
    if words[0] != sys.executable:
        return False
    _, program = _parsed(words)
    if program[0] == "-m":
        return len(program) > 1 and program[1] in MODULES
    path = Path(program[0])
    return path.suffix == ".py" and path.resolve().is_relative_to(ROOT)


def read_in_imports(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables that an import may have read: in the first stage, and only in the second.

    A fork whose own would be others is no honest copy of a new process. So a variable that this
    file does not know belongs to the first.
    """
    early = {k: v for k, v in environment.items() if not k.startswith(READ_LATER) and k != ROOM}
    of_hub = {name: early.pop(name) for name in list(early) if name.startswith(OF_THE_HUB)}
    return early, of_hub


@dataclass
class Job:
    """What a fork is to be."""

    words: list[str]
    environment: dict[str, str]
    directory: str
    ignored: list[int]
    """Signals that who starts it ignores, and so it does."""


@dataclass
class Child:
    """A fork that lives, or whose end the tests have not seen."""

    pid: int
    ended: int
    """A file descriptor that is readable once it has."""
    line: socket.socket
    """To who asked for it. Closing it there is to have seen the end."""
    told: bool = False


class Server:
    """Forks on request, until nobody can ask any more."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests: socket.socket | None = requests
        self.children: list[Child] = []

    def serve(self) -> Job:
        """Answer. Returns in the forks only, with what each is to be."""
        while self.requests is not None or self.children:
            waiting: list[Any] = [c.line if c.told else c.ended for c in self.children]
            if self.requests is not None:
                waiting.append(self.requests)
            ready, _, _ = select.select(waiting, [], [])
            for child in [c for c in self.children if (c.line if c.told else c.ended) in ready]:
                self._look_after(child)
            if self.requests in ready:
                job = self._answer()
                if job is not None:
                    return job
        os._exit(0)

    def _answer(self) -> Job | None:
        assert self.requests is not None
        message, fds, _, _ = socket.recv_fds(self.requests, 1 << 20, 5)
        if not message:
            self.requests.close()
            self.requests = None
            return None
        asked = json.loads(message)
        line, *streams = (socket.socket(fileno=fds[0]), *fds[1:])
        pid = os.fork()
        if pid:
            for fd in streams:
                os.close(fd)
            self.children.append(Child(pid, os.pidfd_open(pid), line))
            return None
        self._forget()
        if asked["session"]:
            os.setsid()
        line.send(str(os.getpid()).encode())
        if "modules" in asked:
            set_environment(asked["environment"])
            preload(asked["modules"])
            line.send(b"ready")
            line.close()
            self.requests = socket.socket(fileno=streams[0])
            return None
        line.close()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        asked.pop("session")
        return Job(**asked)

    def _look_after(self, child: Child) -> None:
        """Report an end; later, when that has been seen, let the process's number be used again."""
        if not child.told:
            end = os.waitid(os.P_PIDFD, child.ended, os.WEXITED | os.WNOWAIT)
            assert end is not None
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            with contextlib.suppress(OSError):  # nobody waits for it any more
                child.line.send(str(code).encode())
            child.told = True
        elif not child.line.recv(1):
            os.waitpid(child.pid, 0)
            os.close(child.ended)
            child.line.close()
            self.children.remove(child)

    def _forget(self) -> None:
        """In a fork: what belongs to the server."""
        if self.requests is not None:
            self.requests.close()
        for child in self.children:
            os.close(child.ended)
            child.line.close()
        self.requests, self.children = None, []


def preload(modules: list[str]) -> None:
    """Import, and keep the garbage collector from writing into pages that the forks share."""
    sys.path[0] = str(ROOT)
    for name in modules:
        importlib.import_module(name)
    sys.modules.pop("snapshot.__main__", None)  # or `python -m snapshot` would warn
    gc.collect()
    gc.freeze()


def become(job: Job) -> NoReturn:
    """Be the process that a job describes, from its first line to its exit code."""
    options, program = _parsed(job.words)
    reset_signals(job.ignored)
    os.chdir(job.directory)
    set_environment(job.environment)
    show_in_proc(job.words, job.environment)
    sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]  # not that of the other forks
    sys.orig_argv = list(job.words)
    open_streams("-u" in options)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    code = 1
    try:
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], job.directory
            if program[1] == LAUNCHER:
                _have_workers_forked()
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = program, str(Path(program[0]).resolve().parent)
            path = str(Path(program[0]).absolute())
            main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
            exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)
        code = 0
    except SystemExit as error:
        code = _code_of(error)
    except KeyboardInterrupt as error:
        _report(error)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        _report(error)
    # As Python itself ends: waits for threads, runs what is registered for the exit, flushes.
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("not reached")


def ignored_signals() -> list[int]:
    """Those that this process ignores, which one that it starts would inherit."""
    numbers = signal.valid_signals()
    return sorted(n for n in numbers if signal.getsignal(n) == signal.SIG_IGN)


def reset_signals(ignored: list[int]) -> None:
    """As Python starts with them, whatever the server, or a launcher, has set."""
    signal.set_wakeup_fd(-1)
    ignored = [*ignored, signal.SIGPIPE, signal.SIGXFSZ]
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def open_streams(unbuffered: bool) -> None:
    """The standard streams as Python opens them: they remember whether there is a way back in them.

    In the same objects, because handlers of log messages have them since the imports.
    """
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        now = unbuffered or stream.write_through
        size = 0 if now and number else -1
        mode = "wb" if number else "rb"
        buffer = open(number, mode, size, closefd=False)  # noqa: SIM115  # as long as it lives
        getattr(buffer, "raw", buffer).name = stream.name
        stream.__init__(  # type: ignore[misc]
            buffer,
            stream.encoding,
            stream.errors,
            "\n" if number else None,
            stream.line_buffering and not now,
            now,
        )


def set_environment(environment: Mapping[str, str]) -> None:
    """Exactly this, for Python and C."""
    os.environ.clear()
    os.environ.update(environment)


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
            directory = os.fspath(given["cwd"] or Path.cwd())
            become(Job(words, environment, directory, ignored_signals()))
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


def _parsed(words: list[str]) -> tuple[list[str], list[str]]:
    """Python's own options, and the program with its arguments: '-m name ...' or 'path ...'."""
    place = 1
    while place < len(words) - 1 and words[place] == "-u":
        place += 1
    return words[1:place], words[place:]


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    """The traceback, from the program's own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def main() -> None:
    """Import the first stage and answer on the socket whose number is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; they then hang up
    preload(list(FIRST))
    become(Server(socket.socket(fileno=int(sys.argv[1]))).serve())


if __name__ == "__main__":
    main()
