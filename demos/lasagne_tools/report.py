"""Results of a run, as a table and a JSON file, and the serial run to compare with."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lasagne_tools.fit import RunResults

__all__ = ["print_results", "run_serial"]


def run_serial(script: Path) -> RunResults:
    """Run the serial script with this script's arguments, and return its results.

    It runs in another process before the ranks are forked, so that it has the device and all cores for itself.
    """
    arguments, skip = [], False
    for word in sys.argv[1:]:
        if skip:
            skip = False
        elif word in ("--ranks", "--result"):
            skip = True
        elif word != "--compare" and not word.startswith(("--ranks=", "--result=")):
            arguments.append(word)
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "run.json")
        command = [sys.executable, str(script), *arguments, "--result", str(result)]
        if subprocess.run(command).returncode != 0:
            raise SystemExit(f"{script.name} failed; its messages are above")
        return RunResults(**json.loads(result.read_text()))


def print_results(run: RunResults, options: argparse.Namespace, serial: RunResults | None = None) -> None:
    """Print the table, and write the figures into a file if the command line names one."""
    print(format_table(run, serial))
    if options.result:
        options.result.write_text(json.dumps(dataclasses.asdict(run), indent=2) + "\n")


def format_table(run: RunResults, serial: RunResults | None = None) -> str:
    """Return a table with the run, each of its ranks, and the serial run."""
    data_set = "test" if run.test else "validation"
    lines = ["", f"{'':<14} {'seconds':>8} {'images':>10} {'images/s':>10} {'speed-up':>9} {f'{data_set} error':>17}"]
    for result in [run, serial] if serial else [run]:
        images = sum(result.images)
        speed_up = (
            f"{result.compute_speed(images) / serial.compute_speed(sum(serial.images)):9.2f}" if serial else f"{'':9}"
        )
        error = (result.test or result.validation[-1])[1]
        lines.append(
            f"{result.title:<14} {result.seconds:8.2f} {images:10,} {result.compute_speed(images):10,.1f} "
            f"{speed_up} {error:17.2%}"
        )
        if result.n_ranks > 1:
            for rank, count in enumerate(result.images):
                lines.append(f"{f'  rank {rank}':<14} {'':8} {count:10,} {result.compute_speed(count):10,.1f}")
    lines += ["", "Seconds are those of training steps, without compilation, first steps and validation."]
    lines += [
        f"Not counted for {result.title}: {result.setup_seconds:.1f} s to start, build, compile, and for first steps."
        for result in ([run, serial] if serial else [run])
    ]
    return "\n".join(lines)
