"""Compares a run in which a random worker is killed every few seconds with an undisturbed one.

    python tests/support/survival_run.py --seconds 60 --every 5 --ranks 3 --rule BSP
    python tests/support/survival_run.py --kills 720 --every 0.3 --random --ranks 3 --rule EASGD
    python tests/support/hosts/simulated.py -- python tests/support/survival_run.py --hosts a:2,b:2 --source loader

On simulated hosts, the next worker is killed some seconds after the training has continued: a device whose workers are
killed at their start twice would be left out.  With ``--twice`` another one is killed 0.2 to 3 seconds after each: in
the recovery.  The undisturbed training has the same number of epochs.  Prints a line for each death, and at the end
whether the parameters and the losses are equal, and how often each row was used.  Exits with 1 if a synchronous rule
has other parameters or losses, or a row was not used once in each epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import pathlib
import random
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time

os.environ.setdefault("PYTENSOR_FLAGS", "mode=FAST_COMPILE")
os.environ.setdefault("THEANO_FLAGS", "blas.ldflags=,mode=FAST_COMPILE")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2]), str(pathlib.Path(__file__).resolve().parent)]

import numpy as np
from hosts import SIMULATED
from trainer_model import SYNCHRONOUS, Model, make_epochs

import synkhronos as synk
from synkhronos import ranks
from synkhronos.training import Trainer
from synkhronos.training.loops import death_limit
from synkhronos.training.updates import adam

#: Seconds without a report after which the stacks are printed.
STUCK_SECONDS = 120


class RandomKiller(threading.Thread):
    """Kills a random worker every few seconds, once the training can survive it.

    Parameters
    ----------
    trainer : Trainer
    interval : float
        Seconds between two deaths.
    seed : int
    is_random : bool
        Wait for a random time with the mean `interval` instead: some workers die during a recovery.
    hosts : list of str
        Names of simulated hosts, if any.
    kills_twice : bool
        Kill another worker of the hosts 0.2 to 3 seconds after each.
    """

    def __init__(
        self, trainer: Trainer, interval: float, seed: int, is_random: bool, hosts: list[str], kills_twice: bool
    ):
        super().__init__(daemon=True)
        self.trainer, self.hosts = trainer, hosts
        self.interval, self.random, self.is_over, self.n_killed = interval, random.Random(seed), threading.Event(), 0
        self.is_random, self.kills_twice = is_random, kills_twice

    def run(self) -> None:
        """Kill until `is_over` is set."""
        while self.trainer._loop is None or not self.trainer._loop.death_policy.has_copy:
            time.sleep(0.01)
        policy, session = self.trainer._loop.death_policy, ranks.get_session()
        while not self.is_over.wait(self.random.expovariate(1 / self.interval) if self.is_random else self.interval):
            step = policy.step
            self.n_killed += self.kill_worker(session)
            if self.kills_twice and not self.is_over.wait(self.random.uniform(0.2, 3)):
                self.n_killed += self.kill_worker(session)
            while self.hosts and policy.step <= step and not self.is_over.wait(0.05):
                pass

    def kill_worker(self, session: ranks.Session) -> bool:
        """Kill a worker of a random host; return whether there was one: in a recovery there may be none."""
        host = self.random.choice(self.hosts) if self.hosts else None
        if host is not None and host != self.hosts[0]:
            return self.kill_on_host(host)
        pids = list(session.worker_pids.values())
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.random.choice(pids), signal.SIGKILL)
        return bool(pids)

    def kill_on_host(self, host: str) -> bool:
        """Kill a worker of another host; return whether there was one."""
        command = [sys.executable, SIMULATED, "rsh", host, "pgrep -f [f]ork_server"]
        pids = subprocess.run(command, capture_output=True, text=True).stdout.split()[1:]  # not the server itself
        command[-1] = f"kill -KILL {self.random.choice(pids)}" if pids else "false"
        return bool(pids) and subprocess.run(command).returncode == 0


def train(options: argparse.Namespace, n_epochs: int, is_disturbed: bool):
    """Train for some seconds, kills, or epochs; return parameters, counts of rows, and reports."""
    hosts = [name for name in options.hosts.split(",") if name]
    synk.fork(**({"hosts": hosts} if hosts else {"n_parallel": options.ranks}), use_gpu=options.gpu)
    update = adam if options.shard else None
    model = Model(options.rule, rate=0.001, noise=options.noise, update=update, shard_optimizer=options.shard)
    names = [name.partition(":")[0] for name in hosts]
    killer = RandomKiller(model.trainer, options.every, options.seed, options.random, names, options.twice)
    if is_disturbed:
        killer.start()
    start, reports = time.monotonic(), []
    for report in make_epochs(model, options.source, n_epochs, max_deaths=10**6):
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        reports.append(report)
        for death in report.deaths:
            print(f"{time.monotonic() - start:6.1f} s", death, flush=True)
        if is_disturbed and (time.monotonic() - start > options.seconds or killer.n_killed >= options.kills):
            break
    if is_disturbed:
        killer.is_over.set()
        killer.join()
    try:
        result = np.asarray(model.values()), np.asarray(model.count_uses()), reports, killer.n_killed
    except synk.WorkerError:  # killed after the last report
        result = np.asarray(model.values()), None, reports, killer.n_killed
    synk.close()
    return result


def main() -> int:
    """Train twice, and compare the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="ranks on GPUs; --every has to be longer than a recovery")
    parser.add_argument("--hosts", default="", help="simulated hosts with their numbers of ranks, as a:2,b:2")
    parser.add_argument("--source", default="arrays", choices=("arrays", "loader", "parts"))
    parser.add_argument("--rule", default="BSP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", action="store_true", help="a random stream of each rank")
    parser.add_argument("--shard", action="store_true", help="Adam, sharded, under BSP")
    parser.add_argument("--kills", type=int, default=10**9, help="end after so many kills")
    parser.add_argument("--random", action="store_true", help="random times between two deaths, some in recoveries")
    parser.add_argument("--twice", action="store_true", help="on hosts: another kill in each recovery")
    options = parser.parse_args()
    if options.random:
        death_limit.MAX_DEATHS_SINCE_COPY = 10**6
    values, used, reports, n_killed = train(options, 10**9, True)
    n_files = len(os.listdir("/proc/self/fd"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    expected, _, undisturbed_reports, _ = train(options, len(reports), False)
    deaths = [death for report in reports for death in report.deaths]
    has_same_values = np.array_equal(values, expected)
    has_same_losses = [report.loss for report in reports] == [report.loss for report in undisturbed_reports]
    seconds = [death["seconds"] for death in deaths] or [0.0]
    counts = None if used is None else sorted(set(used.tolist()))
    print(
        f"{options.rule}: {len(reports)} epochs, {n_killed} workers killed, {len(deaths)} deaths survived; "
        f"seconds lost: {sum(seconds):.1f}, median {statistics.median(seconds):.2f}, at most {max(seconds):.2f}; "
        f"the master's memory {memory} MiB, files {n_files}; "
        f"parameters equal: {has_same_values}; losses equal: {has_same_losses}; each row used {counts} times"
    )
    is_equal = has_same_values and has_same_losses or options.rule not in SYNCHRONOUS
    return int(not is_equal or counts not in (None, [float(len(reports))]))


if __name__ == "__main__":
    sys.exit(main())
