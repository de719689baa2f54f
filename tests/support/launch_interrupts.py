"""Runs that tests interrupt, and a supervisor without ranks."""

import contextlib
import json
import subprocess
import sys

from launch_runs import ENVIRONMENT, make_synkhronos_command
from paths import SUPPORT
from system import wait_until

from synkhronos.launcher.configuration.settings import Settings
from synkhronos.launcher.supervision import run_folder, supervisor

LIMIT = 60


class ShellSupervisor(supervisor.Supervisor):
    """Supervisor of a shell command in place of ranks."""

    def __init__(self, folder, script, **settings):
        super().__init__(Settings("module", "Class", ".", ("cpu",), folder=str(folder), **settings))
        self.script = script
        run_folder.create_and_lock_run_folder(self.settings, []).close()

    def _start_master(self, consoles):
        # Signals are sent once the supervisor knows the processes to forward them to.
        script = f"until [ -e {self.folder}/started ]; do sleep 0.01; done; {self.script}"
        self._master = subprocess.Popen(["sh", "-c", script], stdout=consoles[0], start_new_session=True)
        (self.folder / "started").touch()

    def read_record(self):
        return json.loads((self.folder / "run.json").read_text())


def wait_until_training(folder, process):
    """Wait until all ranks train; return the process IDs of supervisor, master and worker."""
    wait_until((folder / "rank-1.jsonl").exists, process, LIMIT)
    return process.pid, *json.loads((folder / "processes.json").read_text())


@contextlib.contextmanager
def start_checkpointed_run(tmp_path, script, name="SlowMLP", **settings):
    """Context with a run that writes checkpoints; its supervisor is killed at the end of the block."""
    settings = {"modelfile": "launch_models.mlp_variants", "modelclass": name, "every": 1, "epochs": 1000, **settings}
    if script:
        settings = {**settings, "devices": ["cpu", "cpu"], "folder": str(tmp_path)}
        words = [
            sys.executable,
            "-c",
            "from synkhronos.exchange_rules import BSP\nfrom synkhronos.launcher import start_run\n"
            f"start_run(BSP(), **{settings!r}).wait()",
        ]
    else:
        sets = [f"--set={name}={value}" for name, value in settings.items()]
        words = make_synkhronos_command("train", "--devices=cpu,cpu", "--folder", tmp_path, *sets)
    process = subprocess.Popen(
        words, cwd=SUPPORT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
