"""Programs on several hosts that one machine simulates.

If namespaces are not permitted, the hosts are fake: processes of this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from paths import ROOT, SUPPORT

HERE = Path(__file__).resolve().parent
SIMULATED, RSH = HERE / "simulated.py", HERE / "rsh.sh"
PROGRAMS = HERE / "programs.py"
#: Programs on fake GPUs, two per host; only their processes have the fakes on the path.
GPUS = HERE.parent / "gpus"
GPU_PROGRAMS = GPUS / "programs.py"
#: One thread per rank on any host, so that results do not depend on the placement of ranks.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


@cache
def are_simulated() -> bool:
    """Return whether this machine can simulate hosts with a network and memory of their own.

    Otherwise ``mpirun`` treats the machine as several hosts, which then share files and memory.
    """
    done = subprocess.run([sys.executable, SIMULATED, "--hosts", "a", "--", "true"], capture_output=True, timeout=60)
    return done.returncode == 0


def make_command(hosts: list[str], *command: object, gpus: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return a command line, and its environment, that runs a command on the first of these hosts."""
    python = [sys.executable, *map(str, command)]
    path = os.pathsep.join(
        [str(ROOT), str(SUPPORT), str(ROOT / "tests" / "exchange_rules"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    # With a compiler Theano would fold constants by C++, and each rank would first scan all compiled modules.
    flags = {"THEANO_FLAGS": f"{os.environ.get('THEANO_FLAGS', '')},cxx=".lstrip(",")}
    flags["PYTHONWARNINGS"] = "ignore::UserWarning:theano.configdefaults"  # the warning that there is no compiler
    environment = {**os.environ, **ONE_THREAD, **flags, "PYTHONPATH": path, "HOSTS": ",".join(hosts)}
    if gpus:
        environment["PYTHONPATH"] += os.pathsep + str(GPUS / "fake")
        environment |= {"FAKE_GPUS": "2", "JAX_PLATFORMS": "cpu", "PYTENSOR_FLAGS": "mode=JAX"}
        environment.pop("SYNKHRONOS_HOSTS", None)
    names = ",".join(host.partition(":")[0] for host in hosts)
    if are_simulated():
        environment |= {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": str(RSH), "PRTE_MCA_plm_ssh_agent": str(RSH)}
        return [sys.executable, str(SIMULATED), "--hosts", names, "--", *python], environment
    return python, environment | {"HYDRA_LAUNCHER": "fork"}


def slow_down_agents() -> None:
    """Let agents that this process starts sleep for a millisecond: their polling takes twice as long as short programs."""
    from synkhronos.hosts import mpirun

    settings = "from synkhronos.hosts import agent; agent._BUSY_POLL_SECONDS, agent._MIN_SLEEP_SECONDS = 0, 1e-3\n"
    assert "\nmain(address)" in mpirun._AGENT_PROGRAM
    mpirun._AGENT_PROGRAM = mpirun._AGENT_PROGRAM.replace("\nmain(address)", f"\n{settings}main(address)")


class HostProgram:
    """A process on the first of these hosts that runs programs one after another on the same ranks."""

    def __init__(self, hosts: list[str], gpus: bool):
        command, environment = make_command(hosts, GPU_PROGRAMS if gpus else PROGRAMS, "serve", gpus=gpus)
        self.hosts, self.failed = (hosts, gpus, are_simulated()), False
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )

    def run(self, *program: object) -> str:
        """Run a program; return its output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        lines: list[str] = []
        try:
            print(json.dumps([str(word) for word in program]), file=self._process.stdin)
            for line in iter(self._process.stdout.readline, "ended\n"):
                lines.append(line)
                assert line, self._read()
        except BaseException:  # including a test's time limit
            self.failed = True
            self._process.kill()
            raise
        return "".join(lines)

    def end(self) -> None:
        """End the process, and check its exit status unless a program has failed."""
        with self._process as process, self._errors:
            if not self.failed:
                process.communicate(timeout=60)
                assert process.returncode == 0, self._read()

    def _read(self) -> str:
        self._process.wait(60)
        self._errors.seek(0)
        return self._errors.read()


#: Reused processes: at most one on one host, and one on several hosts, whose agents poll all the time.
_programs: dict[bool, HostProgram] = {}


def run(hosts: list[str], *program: object, gpus: bool = False) -> str:
    """Run one of `PROGRAMS` or `GPU_PROGRAMS` on the first of these hosts; return its output.

    The next program on the same hosts reuses the ranks, until `end` ends them.
    """
    several = len(hosts) > 1
    reused = _programs.get(several)
    if reused is None or reused.hosts != (hosts, gpus, are_simulated()) or reused.failed:
        end(several)
        reused = _programs[several] = HostProgram(hosts, gpus)
    return reused.run(*program)


def end(*conditions: bool) -> None:
    """End the hosts that `run` has left running."""
    for several in conditions or (False, True):
        if several in _programs:
            _programs.pop(several).end()


def can_fake_hosts() -> bool:
    """Return whether this ``mpirun`` can treat one machine as several, fake hosts, as MPICH's does."""
    mpirun = Path(sys.executable).with_name("mpirun")
    return "HYDRA" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout


def has_mpi() -> bool:
    """Return whether ``mpirun`` and mpi4py are installed."""
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return False
    return Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun") is not None
