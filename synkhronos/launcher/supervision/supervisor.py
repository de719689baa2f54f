"""The process that starts a run, copies the output of its ranks, and records its exit status.

::

    supervisor ── pipe for each rank ──< ranks of this host
        │      └── pipe ── master ── mpirun ──< ranks of other hosts
        │ starts
        master: rank 0
        │ forks
        workers: the other ranks

After a failure the supervisor starts the ranks again from the newest checkpoint, at most ``restarts`` times.  With
``on_death = "continue"`` it starts them after a death from the newest memory checkpoint (see `MemoryCheckpointFolder`).
A device whose rank can't start, or a lost host, is left out (see `DeathLimit`).

When one of the processes is killed, the others exit: the kernel kills a child when its parent dies, the master watches
its workers, and the supervisor waits for the master.

Invariant: the exit status is recorded, even if the console or the logs can't be written (see `rank_output`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from synkhronos.gpus import format_visible_gpus
from synkhronos.launcher import core_binding
from synkhronos.launcher.configuration.settings import Settings
from synkhronos.launcher.supervision.master_arguments import COMPLETE_EXIT_CODE, MasterArguments
from synkhronos.launcher.supervision.memory_checkpoint_folder import MemoryCheckpointFolder
from synkhronos.launcher.supervision.rank_output import Console, LineSplitter, OutputWriter, open_standard_streams
from synkhronos.launcher.supervision.run_folder import FAILURE_FILE, PROCESSES_FILE, DeathLog, record_run_end
from synkhronos.ranks.child_process import make_python_path
from synkhronos.ranks.errors import Death, describe_exit
from synkhronos.training.checkpoints.checkpoint_folder import copy_checkpoint, list_checkpoints
from synkhronos.training.loops.death_limit import DeathLimit
from synkhronos.training.loops.stop_signals import DUPLICATE_SIGNAL_SECONDS, STOP_SIGNALS

#: Seconds that ranks have to exit after Ctrl-C.
_EXIT_SECONDS = 10.0


class Supervisor:
    """Parent process of a run's ranks.  With ``parent_pid`` the run stops when the process of this ID exits.

    ``signal_number`` is the number of the first signal received; 0 before.
    """

    def __init__(self, settings: Settings, parent_pid: int | None = None):
        self.settings, self.parent_pid = settings, parent_pid
        self.folder = Path(settings.folder)
        self.signal_number = 0
        self._signal_time = 0.0
        self._deadline = float("inf")
        self._master: subprocess.Popen[bytes] | None = None
        self._n_restarts = 0
        self._has_master_died = False
        self._memory_checkpoints: MemoryCheckpointFolder | None = None
        self._deaths = DeathLog(self.folder)
        self._death_limit = DeathLimit(settings.max_deaths)
        #: Number of deaths in the log.
        self._n_logged_deaths = 0
        self._old_checkpoints = self._list_checkpoints()
        #: Checkpoint, on disk or in memory, that the ranks resume from.
        self._checkpoint_path = settings.resume
        if settings.resume == "latest":
            self._checkpoint_path = str(list_checkpoints(self.folder / "checkpoints")[-1])
        self._console = Console(1, self._enforce_deadline)
        self._error_console = Console(2, self._enforce_deadline)

    def run(self) -> int:
        """Start the ranks, wait for their end, and return the exit status."""
        previous_handlers = {
            number: signal.signal(number, self._handle_signal)
            for number in (signal.SIGINT, *STOP_SIGNALS)
            # Ignored signals stay ignored, such as SIGHUP under nohup.
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
        }
        exit_record: dict[str, Any] = {"status": 1}
        try:
            if self.settings.on_death == "continue":
                self._memory_checkpoints = MemoryCheckpointFolder()
            while True:
                # Each rank of this machine has a pipe; all other hosts share one.
                pipes = [os.pipe() for _ in range(len(self.settings.devices) + bool(self.settings.hosts))]
                try:
                    self._start_master([write for _, write in pipes])
                finally:
                    for _, write in pipes:
                        os.close(write)
                self._supervise_until_exit([read for read, _ in pipes])
                assert self._master is not None
                exit_record = self._report_master_exit(self._master.wait())
                if not exit_record["status"] or "signal" in exit_record or self.signal_number:
                    break
                if not self._prepare_recovery():
                    if self._n_restarts == self.settings.restarts:
                        break
                    self._prepare_restart()
        except BaseException as error:
            exit_record["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._kill_ranks()
            if self._master is not None:
                self._master.wait()
            if self._memory_checkpoints is not None:
                self._save_newest_memory_checkpoint(exit_record)
                self._memory_checkpoints.remove()
            self._record_exit(exit_record)
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
        status: int = exit_record["status"]
        return status

    def _start_master(self, pipes: list[int]) -> None:
        """Start the master's process, which starts the other ranks.  They write their output into the pipes."""
        settings = self.settings
        (self.folder / PROCESSES_FILE).unlink(missing_ok=True)  # the master writes it once all ranks have started
        allowed = sorted(os.sched_getaffinity(0))
        rank_cores: list[list[int]] = []
        core_assignment = "not bound (bind = false)"
        if settings.bind:
            rank_cores, core_assignment = core_binding.assign_cores(
                settings.devices, allowed, core_binding.find_gpu_cores(settings.devices)
            )
        n_here = len(settings.devices)
        placement = f"{n_here} {'rank' if n_here == 1 else 'ranks'} on {', '.join(settings.devices)}"
        if settings.hosts:
            placement = f"ranks on hosts {', '.join(settings.hosts)}"
        self._console.write(f"{placement}; {core_assignment}; in {self.folder}\n")
        arguments = MasterArguments(
            supervisor_pid=os.getpid(),
            output_pipes=pipes[:n_here],
            remote_output_pipe=pipes[n_here] if settings.hosts else None,
            rank_cores=rank_cores,
            allowed_cores=allowed,
            checkpoint_path=self._checkpoint_path,
            memory_checkpoint_folder=None if self._memory_checkpoints is None else str(self._memory_checkpoints.path),
            is_recovery=self._death_limit.n_deaths > 0,
        )
        module = "synkhronos.launcher.rank_process.master_process"
        command = [sys.executable, "-m", module, settings.folder, json.dumps(dataclasses.asdict(arguments))]
        # The master inherits this binding: BLAS starts its threads at import, within rank 0's cores.
        core_binding.bind_to_cores(rank_cores[0] if rank_cores else [])
        try:
            self._master = subprocess.Popen(
                command,
                env=self._make_environment(),
                stdin=subprocess.DEVNULL,
                stdout=pipes[0],
                stderr=pipes[0],
                pass_fds=pipes,
                start_new_session=True,  # the terminal sends Ctrl-C to this process alone, which passes it on
            )
        finally:
            core_binding.bind_to_cores(allowed)

    def _make_environment(self) -> dict[str, str]:
        """Return the master's environment, with the run's GPUs and the path of this library."""
        environment = dict(os.environ)
        if self.settings.uses_gpus and not self.settings.hosts:  # other hosts choose among their own GPUs
            numbers = [int(device.removeprefix("cuda")) for device in self.settings.devices]
            environment["CUDA_VISIBLE_DEVICES"] = format_visible_gpus(numbers)
        environment["PYTHONPATH"] = make_python_path()
        return environment

    # -- signals ---------------------------------------------------------------------------------------------

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Send the first signal to the ranks.  Kill them at the second.

        A signal within `DUPLICATE_SIGNAL_SECONDS` after the first is taken for a copy of the first.  A scheduler may
        send the signal to all processes of a job, and a script that waits for this process may forward it.
        """
        now = time.monotonic()
        if self.signal_number:
            if signal.SIGINT in (number, self.signal_number) or now > self._signal_time + DUPLICATE_SIGNAL_SECONDS:
                self._deadline = now
                self._kill_ranks()
            return
        self.signal_number, self._signal_time, self._deadline = number, now, now
        if self._master is None or self._master.poll() is not None:
            return
        if number == signal.SIGINT:
            self._deadline += _EXIT_SECONDS
            message = "the ranks are asked to stop; Ctrl-C once more ends them at once\n"
        elif self.settings.saves_on_signal:
            self._deadline += self.settings.grace
            message = f"{signal.Signals(number).name}: the ranks are asked to write a checkpoint and to end\n"
        else:
            self._kill_ranks()
            return
        self._master.send_signal(number)
        with contextlib.suppress(OSError):
            os.write(2, message.encode())

    def _enforce_deadline(self) -> bool:
        """Kill the ranks if their deadline has passed.  Return True if it has."""
        if self.parent_pid is not None and os.getppid() != self.parent_pid and not self.signal_number:
            self._handle_signal(signal.SIGTERM, None)
        if time.monotonic() <= self._deadline:
            return False
        self._kill_ranks()
        return True

    def _kill_ranks(self) -> None:
        """Kill the ranks and their children, without waiting: a signal handler may call this during a wait."""
        if self._master is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._master.pid, signal.SIGKILL)

    # -- output ----------------------------------------------------------------------------------------------

    def _supervise_until_exit(self, pipes: list[int]) -> None:
        """Supervise the ranks until the master exits: copy their output from pipes, and kill them at their deadline.

        The output goes into logs and to the console.
        """
        assert self._master is not None
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            is_continued = self.settings.resume is not None or self._n_restarts + self._death_limit.n_deaths > 0
            output = OutputWriter(self.folder, is_continued, self._console, self._error_console)
            stack.callback(output.close)
            for rank, pipe in enumerate(pipes):
                stack.callback(os.close, pipe)
                name = f"rank-{rank}.log" if rank < len(self.settings.devices) else ""
                selector.register(pipe, selectors.EVENT_READ, LineSplitter(name, output))
            wait_deadline = float("inf")
            while selector.get_map():
                events = selector.select(0.2)
                for key, _ in events:
                    if not key.data.feed(os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fd)
                if self._master.poll() is not None and not events:
                    # Processes that a rank has started may keep its pipe open.  A killed rank releases its device
                    # before its pipe is closed, and a restart needs the device.
                    self._kill_ranks()
                    wait_deadline = min(wait_deadline, time.monotonic() + _EXIT_SECONDS)
                    starts_again = self._memory_checkpoints is not None or self._n_restarts < self.settings.restarts
                    is_last = self._master.poll() == COMPLETE_EXIT_CODE or not starts_again
                    if is_last or time.monotonic() > wait_deadline:
                        break
                self._enforce_deadline()
            for key in list(selector.get_map().values()):
                key.data.feed(b"")

    # -- restarts --------------------------------------------------------------------------------------------

    def _list_checkpoints(self) -> set[tuple[Path, int]]:
        """Return the checkpoints in the run's folder, with the times in nanoseconds at which they were written."""
        return {(path, path.lstat().st_mtime_ns) for path in list_checkpoints(self.folder / "checkpoints")}

    def _prepare_recovery(self) -> bool:
        """Prepare a start from a memory checkpoint after a death.  Return False without a death, or after too many."""
        if self._memory_checkpoints is None:
            return False
        deaths = self._deaths.read()
        assert self._master is not None
        if self._has_master_died:
            self._deaths.add(Death.from_exit(0, "", self._master.pid, self._master.returncode))
            deaths = self._deaths.read()
        if len(deaths) == self._n_logged_deaths:
            return False  # the ranks have raised an error, and would raise it again
        self._n_logged_deaths = len(deaths)  # the master may record a death, and then die too
        paths = list_checkpoints(self._memory_checkpoints.path)
        newest = str(paths[-1]) if paths else self._checkpoint_path
        limit, rank = self._death_limit, deaths[-1]["rank"]
        if newest != self._checkpoint_path:
            limit.reset_counts_since_copy()
        if excess := limit.record_death(rank, deaths[-1]["is_failed_start"]):
            self._error_console.write(f"{excess}\n")
            return False
        if limit.is_rank_unusable:
            limit.reset_counts_since_copy()
            if not (self._remove_ranks_of_hosts(deaths) if self.settings.hosts else self._remove_device(rank)):
                return False
        self._checkpoint_path = newest
        (self.folder / FAILURE_FILE).unlink(missing_ok=True)
        self._remove_records_without_checkpoint()
        source = "the beginning, as there is no checkpoint" if newest is None else f"the checkpoint {Path(newest).name}"
        self._error_console.write(f"death {limit.n_deaths} of at most {limit.max_deaths}: from {source}\n")
        return True

    def _remove_device(self, rank: int) -> bool:
        """Remove the device of a rank that can't start from the settings.  Return False if the run can't continue."""
        settings = self.settings
        devices = tuple(device for r, device in enumerate(settings.devices) if r != rank)
        cause = f"rank {rank} can't start on {settings.devices[rank]}"
        if not devices:
            self._error_console.write(f"{cause}: on_death = 'continue' has no device left\n")
            return False
        self._error_console.write(f"{cause}, which is left out: the run continues with {', '.join(devices)}\n")
        self.settings = dataclasses.replace(settings, devices=devices)
        self.settings.save()
        return True

    def _remove_ranks_of_hosts(self, deaths: list[dict[str, Any]]) -> bool:
        """Remove the ranks of a lost host, or those without GPUs.  Return False if the run can't continue."""
        settings, n_left = self.settings, deaths[-1].get("ranks_left", 0)
        names = [host.partition(":")[0] for host in settings.hosts]
        lost_names = [death["host"] for death in deaths if "step" not in death and death["host"] in names[1:]]
        if deaths[-1]["host"] == names[0] and n_left:
            lost_names.append(names[0])
        if not lost_names:
            self._error_console.write(
                f"the run can't start again on {', '.join(self.settings.hosts)}, and no host but the first was lost; "
                "if the run has checkpoints, go on with --resume and other --hosts\n"
            )
            return False
        name = lost_names[-1]
        hosts = list(settings.hosts)
        hosts[names.index(name) : names.index(name) + 1] = [f"{name}:{n_left}"] if n_left else []
        cause = "can't start all of its ranks" if "ranks_left" in deaths[-1] else "can't be reached"
        effect = f"has {n_left} from now on" if n_left else "is left out"
        self._error_console.write(f"host {name} {cause}, and {effect}: the run continues on {', '.join(hosts)}\n")
        devices = settings.devices[:n_left] if name == names[0] else settings.devices
        self.settings = dataclasses.replace(settings, hosts=tuple(hosts) if len(hosts) > 1 else (), devices=devices)
        self.settings.save()
        return True

    def _prepare_restart(self) -> None:
        """Choose the newest checkpoint of this run, or the one that it resumed from.  Rename the file of the failure.

        Without a checkpoint the run starts from its beginning, and its records are removed.
        """
        self._n_restarts += 1
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.folder / FAILURE_FILE, self.folder / FAILURE_FILE.replace(".", f"-{self._n_restarts}."))
        if self._memory_checkpoints is not None:  # memory checkpoints are later than the checkpoint
            self._memory_checkpoints.clear()
        written_paths = {path for path, _ in self._list_checkpoints() - self._old_checkpoints}
        if new_paths := [path for path in list_checkpoints(self.folder / "checkpoints") if path in written_paths]:
            self._checkpoint_path = str(new_paths[-1])
        self._remove_records_without_checkpoint()
        source = self._checkpoint_path or "the beginning, as it has no checkpoint"
        self._error_console.write(f"restart {self._n_restarts} of {self.settings.restarts} from {source}\n")

    def _remove_records_without_checkpoint(self) -> None:
        """Remove the records if the run starts from its beginning."""
        if self._checkpoint_path is None:
            for file in self.folder.glob("*.jsonl"):
                file.unlink()

    def _save_newest_memory_checkpoint(self, exit_record: dict[str, Any]) -> None:
        """Save the newest memory checkpoint on disk, if a signal has ended the run before the ranks could write one."""
        assert self._memory_checkpoints is not None
        paths = list_checkpoints(self._memory_checkpoints.path)
        if not (paths and self.signal_number and self.settings.saves_on_signal) or exit_record.get("checkpoint"):
            return
        folder = self.folder / "checkpoints"
        try:
            path = copy_checkpoint(paths[-1], folder)
        except OSError as error:
            self._error_console.write(f"{folder / paths[-1].name} can't be written: {error}\n")
            return
        exit_record["checkpoint"] = str(path)
        self._error_console.write(f"--resume continues from {path}, the last memory checkpoint\n")

    # -- the end ---------------------------------------------------------------------------------------------

    def _report_master_exit(self, code: int) -> dict[str, Any]:
        """Report the master's return code and a failure's cause.  Return status and signal for ``run.json``."""
        assert self._master is not None
        is_complete = code == COMPLETE_EXIT_CODE
        failed_status = 128 - code if code < 0 else code or 1
        exit_record: dict[str, Any] = {"status": 0 if is_complete else failed_status}
        if self.signal_number and (code < 0 or is_complete and self.signal_number == signal.SIGINT):
            exit_record["status"] = 128 + self.signal_number
        failure = self.folder / FAILURE_FILE
        message = failure.read_text("utf-8", "backslashreplace") if failure.is_file() else ""
        number = exit_record["status"] - 128
        checkpoints = list_checkpoints(self.folder / "checkpoints")
        # The master exits with this status after it has written a checkpoint.
        is_saved = code > 128 and number in STOP_SIGNALS and checkpoints
        if is_saved or self.signal_number and number > 0:
            exit_record["signal"] = signal.Signals(number).name
            exit_record["checkpoint"] = str(checkpoints[-1]) if is_saved else None
            message = f"the run was ended by {exit_record['signal']}"
            if is_saved:
                message += f"; --resume continues from {exit_record['checkpoint']}"
            elif self.settings.saves_on_signal and self.signal_number != signal.SIGINT:
                message += ", before it had written a checkpoint"
            message += "\n"
        # After an exception, which would be raised again, there is a message, or the disk is full and the code is 1.
        self._has_master_died = code < 0 or not (is_complete or message or code == 1)
        if not (is_complete or message):
            message = f"rank 0 (process {self._master.pid}) {describe_exit(code)}\n"
            with contextlib.suppress(OSError):  # if the disk is full, only the console gets it
                failure.write_text(message, "utf-8")
        self._error_console.write(message)
        return exit_record

    def _record_exit(self, exit_record: dict[str, Any]) -> None:
        """Add the exit status and the time to ``run.json``."""
        counts = {"restarts": self._n_restarts, "deaths": self._death_limit.n_deaths}
        try:
            record_run_end(self.folder, {name: count for name, count in counts.items() if count} | exit_record)
        except OSError as error:
            self._error_console.write(f"run.json lacks the exit status, {exit_record['status']}: {error}\n")


def main() -> int:
    """Supervise the run in the folder ``argv[1]`` until process ``argv[2]`` exits."""
    open_standard_streams()
    return Supervisor(Settings.load(sys.argv[1]), int(sys.argv[2])).run()


if __name__ == "__main__":
    sys.exit(main())
