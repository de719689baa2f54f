"""What a run showed: a table, a file.

`conclude`
    Prints the table, and writes the file if there is to be one.
`run_serial`
    Trains in one process, by another script, and returns what that showed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import tempfile
from pathlib import Path

from lasagne_tools.fit import Run
from lasagne_tools.options import serial_command

__all__ = ["conclude", "run_serial"]


def run_serial(script: Path) -> Run:
    """Train in one process with the arguments that this script was given.

    In a process of its own: it has the device, its memory and all cores to itself, as it would have without the ranks.

    Parameters
    ----------
    script : Path
        The script that does so.

    Returns
    -------
    Run
        What it showed.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "run.json")
        if subprocess.run(serial_command(script, result)).returncode != 0:
            raise SystemExit(f"{script.name} failed; its messages are above")
        return Run(**json.loads(result.read_text()))


def conclude(run: Run, options: argparse.Namespace, serial: Run | None = None) -> None:
    """Print the table, and write the figures into a file if the command line names one.

    Parameters
    ----------
    run : Run
        What was trained.
    options : Namespace
        The command line's: `result`.
    serial : Run, optional
        The same in one process, to compare with.
    """
    print(table(run, serial))
    if options.result:
        options.result.write_text(json.dumps(dataclasses.asdict(run), indent=2) + "\n")


def table(run: Run, serial: Run | None = None) -> str:
    """Return a line for the run, for each of its ranks, and for the one process beside it.

    Parameters
    ----------
    run : Run
        What was trained.
    serial : Run, optional
        The same in one process; the speed-up is in relation to it.

    Returns
    -------
    str
        The table and two remarks.
    """
    part = "test" if run.test else "validation"
    lines = ["", f"{'':<14} {'seconds':>8} {'images':>10} {'images/s':>10} {'speed-up':>9} {f'{part} error':>17}"]
    for each in [run, serial] if serial else [run]:
        images = sum(each.images)
        speed_up = f"{each.speed(images) / serial.speed(sum(serial.images)):9.2f}" if serial else f"{'':9}"
        error = (each.test or each.validation[-1])[1]
        lines.append(
            f"{each.title:<14} {each.seconds:8.2f} {images:10,} {each.speed(images):10,.1f} {speed_up} {error:17.2%}"
        )
        if each.n_ranks > 1:
            for rank, count in enumerate(each.images):
                lines.append(f"{f'  rank {rank}':<14} {'':8} {count:10,} {each.speed(count):10,.1f}")
    lines += ["", "Seconds are those of the training steps but the first of each kind, without validation."]
    lines += [
        f"Not counted for {each.title}: {each.setup_seconds:.1f} s to start, to build and compile, and for first steps."
        for each in ([run, serial] if serial else [run])
    ]
    return "\n".join(lines)
