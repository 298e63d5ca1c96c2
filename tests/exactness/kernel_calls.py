"""Records the system calls of starts in forked children, and kills a start or fails a call.

strace stops a process at its n-th call of a kind and kills it there, or makes the call fail. A
recording lists the calls that change something below a directory. By default strace only follows
the main thread, because this thread does all of the writing (killed_child.py arranges this,
test_kill_points.py proves it). With -f strace follows every thread and counts the calls of each
thread separately.
"""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import killed_child
from forked_ranks import FOLDERS, rank_environment
from launching import CPU_ENVIRONMENT, free_port, launch_options, quiet_environment

START_LIMIT_S = 120

# All calls that change files or flush them to storage.
CALLS = (
    "write,writev,pwrite64,pwritev,pwritev2,fsync,fdatasync,sync,syncfs,sync_file_range,msync,"
    "rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,open,openat,creat,link,linkat,"
    "symlink,symlinkat,truncate,ftruncate,fallocate,copy_file_range,sendfile,splice,chmod,fchmod,"
    "fchmodat,utimensat,setxattr,fsetxattr"
)
RECORDING = ("-e", f"trace={CALLS}")
# The parts of temporary files' names that differ from start to start.
_CHANGING = re.compile(
    r"(?<=\.tmp)\w{6}|(?<=\.json\.|\.yaml\.|\.html\.)[\w.-]+(?=\.tmp)"
    r"|(?:(?<=\.arrow\.)|(?<=\.tokenizer\.))[\w.-]+(?=\.partial)"
)
KILL = "KILL"
PID = "{pid}"  # in strace's flags: the id of the traced process
_LINE = re.compile(r"(?:(\d+) +)?(\w+)\((.*)")
# When multiprocessing starts a process, it asks for the exit codes of all other processes. If two
# threads ask at the same time, the second thread gets nothing and reports 255.
_ONE_READER = threading.Lock()


@dataclass(frozen=True)
class Call:
    """A call that changes something below a directory.

    `file` is relative to the directory. `occurrence` counts the thread's calls of this name on this
    file. For files with random names `number` counts the thread's calls of this name on any file.
    `aside`: the call is not from the first thread.
    """

    name: str
    file: str
    occurrence: int
    number: int
    aside: bool = False

    def __str__(self) -> str:
        aside = " aside" if self.aside else ""
        return f"{self.name} {self.file or '.'} #{self.occurrence}{aside}"

    def injecting(self, directory: Path, what: str) -> list[str]:
        """Return strace's flags that KILL the process, or raise an error, at this call."""
        what = "signal=KILL" if what == KILL else f"error={what}"
        random = "tmp*" in self.file  # the file's name is not known in advance
        when = self.number if random else self.occurrence
        # The name of a temporary file has the host and the id of its process.
        file = directory / self.file.replace("*", f"{socket.gethostname()}.{PID}")
        selected = [] if random else ["-P", str(file)]
        inject = f"inject={self.name}:{what}:when={when}"
        return ["-e", f"trace={self.name}", *selected, "-e", inject]


@dataclass(frozen=True)
class Ending:
    """The end of a start. A negative exit code is the number of a signal."""

    exit_code: int
    output: str
    trace: str = ""
    pid: int = 0


class Starts:
    """Starts programs of killed_child.py and writes their output to files in `scratch`."""

    def __init__(self, scratch: Path):
        self.scratch = scratch
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["killed_child"])
        self.count = 0
        # In Python 3.11 the server imports before it receives its parent's sys.path.
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, FOLDERS))

    def run(self, program: str, argv: Sequence[str], **options: Any) -> Ending:
        """Run a program to its end. The option `strace` has the flags for a trace."""
        with self.running(program, argv, **options) as child:
            pass
        return child.ending

    @contextlib.contextmanager
    def running(
        self, program: str, argv: Sequence[str], strace: Sequence[str] | None = None, **options: Any
    ) -> Iterator["Child"]:
        """Run a program during a with block, and wait for the program at the end of the block."""
        self.count += 1
        child = Child(
            self.context, self.scratch / f"{program}-{self.count}", program, argv, options
        )
        with child.traced(strace):
            child.signal.send("go")
            yield child
            child.wait()

    @contextlib.contextmanager
    def ranks(
        self, argv: Sequence[str], strace: Mapping[int, Sequence[str]] | None = None,
        config: str = "multi_gpu", **options: Any,
    ) -> Iterator[list["Child"]]:  # fmt: skip
        """Run `stoker` in two ranks during a with block, and wait for both at its end.

        `strace` has flags by rank. `config` is a name in accelerate_configs. If one rank dies, the
        other rank must end by itself.
        """
        port = free_port()
        arguments = launch_options(config, 2, port)
        own = quiet_environment(CPU_ENVIRONMENT[config])
        with contextlib.ExitStack() as stack:
            children = []
            for rank in range(2):
                env = rank_environment(arguments, own, rank, 2, port)
                flags = (strace or {}).get(rank)
                running = self.running("stoker", argv, strace=flags, env=env, **options)
                children.append(stack.enter_context(running))
            yield children


class Child:
    """One start."""

    def __init__(self, context: Any, files: Path, program: str, argv: Sequence[str], options: dict):
        self.output, self.trace = files.with_suffix(".out"), files.with_suffix(".trace")
        theirs, self.signal = context.Pipe()
        arguments = (theirs, str(self.output), program, list(argv), options)
        self.process = context.Process(target=killed_child.child, args=arguments)
        with _ONE_READER:
            self.process.start()
        theirs.close()
        self.signal.recv()  # so that only calls of the program are counted
        self.ending = Ending(0, "", pid=self.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self) -> None:
        if not multiprocessing.connection.wait([self.process.sentinel], START_LIMIT_S):
            self.process.kill()
            raise AssertionError(f"it does not end: {self.output.read_text()}")
        with _ONE_READER:
            self.process.join()

    @contextlib.contextmanager
    def traced(self, flags: Sequence[str] | None) -> Iterator[None]:
        """Trace the main thread, or all threads with -f, before the program begins."""
        written = ""
        if flags is None:
            yield
        else:
            command = ["strace", "-y", "-s", "0", "-o", str(self.trace), "-p", str(self.pid)]
            command += [flag.replace(PID, str(self.pid)) for flag in flags]
            tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            line = tracer.stderr.readline()
            assert "attached" in line, line + tracer.stderr.read()
            yield
            tracer.communicate(timeout=START_LIMIT_S)
            written = self.trace.read_text(errors="replace")
            self.trace.unlink()
        output = self.output.read_text(errors="replace")
        self.output.unlink()
        self.ending = Ending(self.process.exitcode, output, written, self.pid)
        self.process.close()


def changes_below(directory: Path, trace: str) -> list[Call]:
    """Return the calls of a recording that changed something below a directory, in order."""
    counts: Counter[tuple[str, ...]] = Counter()
    made, found = entered(trace), []
    for event in made:
        at = event.thread, event.name
        file = _file(event.arguments, directory)
        # Count every call, as strace does, but return only calls that change something.
        counts.update([at] if file is None else [at, (*at, file)])
        if file is not None and _changes(event.name, event.arguments):
            aside = event.thread != made[0].thread
            found.append(Call(event.name, file, counts[*at, file], counts[at], aside))
    return found


def hit(call: Call, directory: Path, ending: Ending) -> bool:
    """Return whether this call is the last call of a killed start, or one of the failed calls.

    strace counts calls per thread. The call with this number therefore fails in every thread.
    """
    made = entered(ending.trace)
    struck = made[-1:]
    if ending.exit_code != -signal.SIGKILL:
        struck = [one for one in made if "(INJECTED)" in one.arguments]
    sought = (call.name, call.file, call.aside)
    return any(
        (one.name, _file(one.arguments, directory), one.thread not in ("", str(ending.pid)))
        == sought
        for one in struck
    )


def _changes(name: str, arguments: str) -> bool:
    if re.search(r"\) += -1 E", arguments) and "INJECTED" not in arguments:
        return False
    opens = name.startswith("open")
    return not opens or "O_CREAT" in arguments or "O_TRUNC" in arguments


def _file(arguments: str, directory: Path) -> str | None:
    """Return the file below a directory that a call names or has open, as strace -P finds it."""
    found = re.search(re.escape(str(directory)) + r"(?:/([^\">]*))?[\">]", arguments)
    return _CHANGING.sub("*", found[1] or "") if found else None


@dataclass(frozen=True)
class Event:
    """A call with its thread ("" in a recording of one thread) and its lines of begin and end."""

    thread: str
    name: str
    arguments: str
    began: int
    ended: int


def entered(trace: str) -> list[Event]:
    """Return all calls of a recording in the order of their beginnings, with strace's output."""
    found: list[Event] = []
    unfinished: dict[str, int] = {}
    for number, line in enumerate(trace.splitlines()):
        thread, _, rest = line.partition(" ")
        resumed = re.match(r" *<\.\.\. \w+ resumed>(.*)", rest)
        if resumed and thread in unfinished:
            place = unfinished.pop(thread)
            before = found[place]
            found[place] = dataclasses.replace(
                before, arguments=before.arguments + resumed[1], ended=number
            )
        elif match := _LINE.match(line):
            if line.endswith("<unfinished ...>"):
                unfinished[thread] = len(found)
            found.append(Event(match[1] or "", match[2], match[3], number, number))
    return found


def events(trace: str) -> list[Event]:
    """Return the successful calls of a recording of all threads, in the order of their ends."""
    made = [
        event
        for event in entered(trace)
        if "= -1 E" not in event.arguments and not event.arguments.endswith("<unfinished ...>")
    ]
    return sorted(made, key=lambda event: event.ended)
