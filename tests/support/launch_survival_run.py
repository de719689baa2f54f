"""Compares a run of the launcher in which a random rank is killed every few seconds with an undisturbed one.

    python tests/support/launch_survival_run.py --seconds 40 --every 5 --devices cuda0,cuda1 --rule BSP

A rank is killed ``--every`` seconds after the training has started or continued; with ``--random``, after a random time
whose mean this is.  Prints the seconds lost at each death, and whether parameters and reports are equal.  Exits with 1
if a step was lost or repeated, or if parameters differ under BSP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
from launch_runs import ENVIRONMENT, make_synkhronos_command, read_json_lines  # noqa: E402
from paths import SUPPORT  # noqa: E402

LIMIT = 600


def start(folder: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a training that takes some seconds; return its process."""
    sets = {"model": "'launch_models/mlp_variants.py:Slow'", "epochs": options.epochs, "rule": options.rule}
    words = make_synkhronos_command("train", "--devices", options.devices, "--folder", folder, "--on-death=continue")
    words.append("--set=max_deaths=1000000")
    words += [f"--set={name}={value}" for name, value in sets.items()]
    paths = [ENVIRONMENT["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]  # such as that of pretended GPUs
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(words, cwd=SUPPORT, env=environment, stdout=subprocess.DEVNULL)


def kill_random_ranks(folder: Path, process: subprocess.Popen[bytes], options: argparse.Namespace) -> int:
    """Kill ranks for ``options.seconds``; return the number of kills."""
    chosen, n_killed, record = random.Random(options.seed), 0, folder / "rank-1.jsonl"
    end = float("inf")
    pids: list[int] = []
    while time.monotonic() < end and n_killed < options.kills and process.poll() is None:
        time.sleep(0.05)
        try:
            processes = json.loads((folder / "processes.json").read_text())
            # A recovery truncates the record, then adds a line to deaths.json.
            starts = [
                file.stat().st_mtime for file in (folder / "processes.json", folder / "deaths.json") if file.exists()
            ]
            is_training = record.stat().st_mtime > max(starts)
        except (OSError, ValueError):  # missing, or not written completely
            continue
        if processes == pids or not is_training:
            continue
        end = min(end, time.monotonic() + options.seconds)  # from the first steps on
        time.sleep(chosen.expovariate(1 / options.every) if options.random else options.every)
        if process.poll() is None and time.monotonic() < end:
            pids = processes
            with contextlib.suppress(ProcessLookupError):  # the run has just ended
                os.kill(chosen.choice(pids), signal.SIGKILL)
                n_killed += 1
    return n_killed


def main() -> int:
    """Run both trainings and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--devices", default="cpu,cpu")
    parser.add_argument("--rule", default="BSP")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10**9, help="maximal number of kills")
    parser.add_argument("--random", action="store_true", help="random times between a start and the next death")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a run may take")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        whole, parts = Path(name, "whole"), Path(name, "parts")
        seconds = {}
        n_killed = 0
        for folder in (parts, whole):
            began = time.monotonic()
            process = start(folder, options)
            if folder is parts:
                n_killed = kill_random_ranks(folder, process, options)
            status = process.wait(options.limit)
            seconds[folder.name] = time.monotonic() - began
            if status:
                print(f"{folder.name}: exit status {status}")
                return 1
        file = parts / "deaths.json"
        deaths = json.loads(file.read_text()) if file.exists() else []
        for death in deaths:
            print(f"rank {death['rank']} {death['cause']}: from step {death['step']}, {death['seconds']} s lost")
        with np.load(whole / "params.npz") as expected, np.load(parts / "params.npz") as params:
            is_same = all(np.array_equal(expected[name], params[name]) for name in expected)
            difference = max(float(np.abs(expected[name] - params[name]).max()) for name in expected)
        losses = [[report["loss"] for report in read_json_lines(folder, "reports")] for folder in (whole, parts)]
        n_ranks = len(options.devices.split(","))
        rows = [
            [sum(line["rows"] for line in read_json_lines(f, f"rank-{r}")) for r in range(n_ranks)]
            for f in (whole, parts)
        ]
        lost_seconds = [death["seconds"] for death in deaths]
        times = (
            f"median {statistics.median(lost_seconds):.1f}, at most {max(lost_seconds):.1f}" if lost_seconds else "none"
        )
        print(
            f"{options.rule} on {options.devices}: {n_killed} ranks killed, {len(deaths)} deaths survived; seconds lost: "
            f"{times}; undisturbed "
            f"{seconds['whole']:.1f} s, disturbed {seconds['parts']:.1f} s; parameters equal: {is_same}; "
            f"losses equal: {losses[0] == losses[1]}; largest differences: {difference:.1e} and "
            f"{max(abs(a - b) for a, b in zip(*losses, strict=False)):.1e}; rows of each rank: {rows[0]} and {rows[1]}"
        )
        if "cuda" in options.devices:  # XLA's kernels may differ from process to process
            is_same = difference < 1e-5
            losses = [[round(loss, 5) for loss in run_losses] for run_losses in losses]
        is_wrong = len(deaths) != n_killed or rows[0] != rows[1] or len(losses[0]) != len(losses[1])
        return int(is_wrong or options.rule == "BSP" and not (is_same and losses[0] == losses[1]))


if __name__ == "__main__":
    sys.exit(main())
