"""The process that starts a run, reads what its ranks print, and says how it ended.

::

    supervisor ── pipe for each rank ──< ranks of this host
        │      └── pipe ── master ── mpirun ──< ranks of other hosts
        │ starts, and ends with its parent if it is told to
        master: rank 0
        │ forks
        workers: the other ranks

Whoever of them is killed, the others end: the kernel tells a child of its parent's death, the master sees its workers'
lives, and the supervisor waits for the master.

`prepare`
    Makes a run's folder.
`supervise`
    Runs it.
`main`
    The same in a process that `Rule.init` starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any

from synkhronos import checks
from synkhronos.launch import binding, elsewhere
from synkhronos.launch.settings import FAILURE, PROCESSES, SETTINGS, Settings, SettingsError
from synkhronos.ranks.errors import cause_of_death

#: Seconds that ranks get to end after Ctrl-C.
_GRACE = 10.0
_PACKAGES = ("synkhronos", "numpy", "pytensor", "Theano", "jax", "Lasagne", "safetensors")


def prepare(settings: Settings, command: list[str]) -> IO[str]:
    """Make a run's folder, with its settings, and what it runs with; return a file that locks it while it is open."""
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "run.json", "a")  # noqa: SIM115 - open as long as the run lasts
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SettingsError(f"folder: {folder} has a run that hasn't ended: wait for it, or name another") from None
    settings.save(folder / SETTINGS)
    for name in (FAILURE, PROCESSES):
        (folder / name).unlink(missing_ok=True)
    _note(folder, {**versions(settings.root), "command": command, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
    return lock


def versions(root: str) -> dict[str, Any]:
    """Return the versions of what computes, and the commit of the model's folder."""
    found: dict[str, Any] = {"python": platform.python_version(), "host": platform.node()}
    found |= checks.versions(_PACKAGES)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for name, words in (("commit", ["rev-parse", "HEAD"]), ("changed", ["status", "--porcelain", "-uno"])):
            done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, timeout=10)
            if done.returncode == 0:
                found[name] = done.stdout.strip() if name == "commit" else bool(done.stdout.strip())
    return found


def python_path() -> str:
    """Return the PYTHONPATH with which a process finds this very library, whatever its working directory."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def _note(folder: Path, news: dict[str, Any]) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(news, indent=1) + "\n")


class Supervisor:
    """One run, which ends with the process ``parent``, if there is one."""

    def __init__(self, settings: Settings, parent: int | None = None):
        self.settings, self.parent = settings, parent
        self.folder = Path(settings.folder)
        self.came = 0
        self._deadline = float("inf")
        self._master: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start the ranks; return the exit status when they have ended: 0, or that of what went wrong."""
        before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            # One for each rank of this machine, and for all other hosts together.
            pipes = [os.pipe() for _ in range(len(self.settings.devices) + bool(self.settings.hosts))]
            try:
                self._start([write for _, write in pipes])
            finally:
                for _, write in pipes:
                    os.close(write)
            self._read([read for read, _ in pipes])
            return self._end()
        finally:
            self._kill()
            if self._master is not None:
                self._master.wait()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, consoles: list[int]) -> None:
        settings = self.settings
        allowed = sorted(os.sched_getaffinity(0))
        masks: list[list[int]] = []
        why = "not bound, as asked"
        if settings.bind:
            masks, why = binding.masks(settings.devices, allowed, binding.gpu_cores(settings.devices))
        n_here = len(settings.devices)
        where = f"{n_here} {'rank' if n_here == 1 else 'ranks'} on {', '.join(settings.devices)}"
        if settings.hosts:
            where = f"ranks on hosts {', '.join(settings.hosts)}"
        sys.stdout.write(f"{where}; {why}; in {self.folder}\n")
        sys.stdout.flush()
        environment = dict(os.environ)
        if settings.on_gpu and not settings.hosts:  # each host takes its own, as many as it has ranks
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            numbers = [int(device.removeprefix("cuda")) for device in settings.devices]
            names = [str(n) for n in numbers] if visible is None else [visible.split(",")[n].strip() for n in numbers]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        environment["PYTHONPATH"] = python_path()
        plan = {
            "supervisor": os.getpid(),
            "consoles": consoles[:n_here],
            "hosts": consoles[n_here] if settings.hosts else None,
            "masks": masks,
            "allowed": allowed,
        }
        command = [sys.executable, "-m", "synkhronos.launch.master", str(self.folder), json.dumps(plan)]
        # Its BLAS starts threads when it is imported: within rank 0's cores.
        binding.bind(masks[0] if masks else [])
        try:
            self._master = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=consoles[0],
                stderr=consoles[0],
                pass_fds=consoles,
                start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on
            )
        finally:
            binding.bind(allowed)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the ranks; the second time, or where they have hardly been started, end them."""
        self._deadline = time.monotonic()
        if self._master is not None and self._master.poll() is None:
            if self.came or number != signal.SIGINT:
                self._kill()
            else:
                self._master.send_signal(number)
                self._deadline += _GRACE
                os.write(2, b"the ranks are asked to stop; Ctrl-C once more ends them at once\n")
        self.came = self.came or number

    def _read(self, pipes: list[int]) -> None:
        """Copy what ranks print into their logs and, with their number before it, to the console."""
        assert self._master is not None
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            consoles = _Consoles(self.folder, "a" if self.settings.resume is not None else "w", stack)
            for rank, pipe in enumerate(pipes):
                stack.callback(os.close, pipe)
                name = f"rank-{rank}.log" if rank < len(self.settings.devices) else ""
                selector.register(pipe, selectors.EVENT_READ, _Lines(name, consoles))
            while selector.get_map():
                events = selector.select(0.2)
                for key, _ in events:
                    if not key.data.take(os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fd)
                if self._master.poll() is not None and not events:
                    break  # what a rank has started may hold the pipes open for ever
                if self.parent is not None and os.getppid() != self.parent:
                    self.came = self.came or signal.SIGTERM
                    self._kill()
                if time.monotonic() > self._deadline:
                    self._kill()
            for key in list(selector.get_map().values()):
                key.data.take(b"")

    def _kill(self) -> None:
        """End the ranks, and what they have started; wait for nobody: a signal may have come in the middle of that."""
        if self._master is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._master.pid, signal.SIGKILL)

    def _end(self) -> int:
        """Say how the run has ended; return its exit status."""
        assert self._master is not None
        code = self._master.wait()
        status = code if code >= 0 else 128 - code
        if self.came and (code < 0 or not status):
            status = 128 + self.came
        failure = self.folder / FAILURE
        words = failure.read_text() if failure.exists() else ""
        if self.came and status > 128:
            words = f"the run was ended by {signal.Signals(status - 128).name}\n"
        elif code and not words:
            words = f"rank 0 (process {self._master.pid}) {cause_of_death(code)}\n"
            with contextlib.suppress(OSError):  # the disk is full: it is said below
                failure.write_text(words)
        sys.stderr.write(words)  # before anything else is written to what may be a full disk
        sys.stderr.flush()
        noted = json.loads((self.folder / "run.json").read_text())
        _note(self.folder, {**noted, "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "status": status})
        return status


class _Lines:
    """What comes by a pipe: the lines of one file, or, without a name, of those that they name themselves."""

    def __init__(self, name: str, consoles: _Consoles):
        self._name, self._consoles, self._rest = name, consoles, b""

    def take(self, data: bytes) -> bool:
        """Pass on whole lines; at the end, what is left. Return whether there may be more."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            text = line.decode(errors="backslashreplace")
            self._consoles.write(*((self._name, text) if self._name else elsewhere.named(text)))
        return bool(data)


class _Consoles:
    """The files in the run's folder, and the console, where what ranks print has their number before it."""

    def __init__(self, folder: Path, mode: str, stack: contextlib.ExitStack):
        self._folder, self._mode, self._stack = folder, mode, stack
        self._logs: dict[str, IO[str]] = {}

    def write(self, name: str, text: str) -> None:
        """Write a line."""
        if name.endswith(".jsonl"):  # which ranks of this machine write themselves
            with open(self._folder / name, "a") as file:
                file.write(f"{text}\n")
            return
        name = name or "hosts.log"
        if name not in self._logs:
            self._logs[name] = self._stack.enter_context(open(self._folder / name, self._mode, buffering=1))
        self._logs[name].write(f"{text}\n")
        with contextlib.suppress(BrokenPipeError):  # nobody reads the console any more; the logs go on
            sys.stdout.write(f"[{Path(name).stem.replace('-', ' ')}] {text}\n")
            sys.stdout.flush()


def main() -> int:
    """Supervise the run of a folder; end with a parent."""
    return Supervisor(Settings.load(Path(sys.argv[1]) / SETTINGS), int(sys.argv[2])).run()


if __name__ == "__main__":
    sys.exit(main())
