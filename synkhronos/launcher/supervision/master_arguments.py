"""Arguments and exit code of the master's process.  The ranks read them without importing the supervisor."""

from dataclasses import dataclass

#: Exit code of the master's process after a complete run.  A library, or the user's class, may exit with 0 at any time.
COMPLETE_EXIT_CODE = 100


@dataclass(frozen=True)
class MasterArguments:
    """Arguments of ``python -m synkhronos.launcher.rank_process.master_process``, as one argument in JSON."""

    #: Process ID of the supervisor.  The master exits when the supervisor exits.
    supervisor_pid: int
    #: File descriptor of the output pipe of each rank of this host.
    output_pipes: list[int]
    #: File descriptor of the pipe for the output of other hosts; None without other hosts.
    remote_output_pipe: int | None
    #: Cores of each rank; empty if ranks are not bound.
    rank_cores: list[list[int]]
    #: Cores that the run may use.
    allowed_cores: list[int]
    #: Checkpoint to resume from, on disk or in memory; None to train from the beginning.
    checkpoint_path: str | None
    #: Folder for memory checkpoints, for ``on_death = "continue"``; None if the run writes none.
    memory_checkpoint_folder: str | None
    #: Whether the ranks start again after a death.
    is_recovery: bool
