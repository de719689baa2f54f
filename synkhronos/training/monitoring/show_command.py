"""The command ``show``: pictures and tables of recorded runs and timelines.

python -m synkhronos show RUN... [--picture FILE] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path
from typing import Any

from synkhronos.timelines import timeline_report
from synkhronos.training.monitoring.recorder import read_records

_COLUMNS = ["run", "file", "time", "seconds", "epoch", "step", "seen", "rows"]
_COLUMNS += ["loss", "learning_rate", "rows_per_second", "compute", "exchange", "wait", "load"]


def main(arguments: list[str]) -> None:
    """Run the command with the arguments that follow ``show``."""
    parser = argparse.ArgumentParser(
        prog="python -m synkhronos show",
        description="Print a line for each run, and draw loss, validation and speed of all runs into one picture. Of a "
        "timeline, print where each rank's time went.",
        epilog="Example: python -m synkhronos show runs/a runs/b",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="the folder of a run or of a recorder, or a file that synkhronos.timeline has written",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="file of the picture; default: show.png in the first folder, or next to the file",
    )
    parser.add_argument("--csv", metavar="FILE", help="file of a table with all records; - for standard output")
    options = parser.parse_args(arguments)
    if any(os.path.isfile(name) for name in options.runs):
        try:
            for name in options.runs:
                _show_timeline(name, options.picture)
        except (OSError, ValueError) as error:
            parser.exit(2, f"{error}\n")
        return
    try:
        runs = {name: read_records(name) for name in options.runs}
    except OSError as error:
        parser.exit(2, f"{error}\n")
    for name, files in runs.items():
        (sys.stderr if options.csv == "-" else sys.stdout).write(format_summary(name, files))
    if options.csv:
        with open(os.dup(1) if options.csv == "-" else options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(build_table(runs))
    if options.picture or not options.csv:
        picture = Path(options.picture or Path(options.runs[0]) / "show.png")
        draw_picture(runs, picture)
        sys.stdout.write(f"picture: {picture}\n")


def _show_timeline(name: str, picture: str | None) -> None:
    """Print the times of a recorded timeline, and draw some of its calls."""
    timelines = timeline_report.read_timelines(name)
    critical_path = timeline_report.find_critical_path(timelines)
    sys.stdout.write(timeline_report.format_report(name, timelines, critical_path))
    picture = picture or f"{name.removesuffix('.gz').removesuffix('.json')}.png"
    timeline_report.draw_timelines(timelines, critical_path, picture)
    sys.stdout.write(f"picture: {picture}; the file can be opened at https://ui.perfetto.dev\n")


def build_table(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the records of all runs, with the run, the file, and the seconds since the run's first record."""
    table = []
    for run, files in runs.items():
        start_time = min((record["time"] for records in files.values() for record in records), default=0.0)
        for file, records in files.items():
            table += [
                {**r, **r.get("seconds", {}), "run": run, "file": file, "seconds": r["time"] - start_time}
                for r in records
            ]
    return table


def format_summary(name: str, files: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line that summarizes a run: its last report."""
    reports = files.get("reports", [])
    if not reports:
        return f"{name}: no report yet\n"
    last_report = reports[-1]
    validation = {f"validation {key}": value for key, value in (last_report.get("validation") or {}).items()}
    numbers = {"loss": last_report.get("loss"), **validation}
    figures = [f"{key} {value:.4g}" for key, value in numbers.items() if value is not None]
    rate = f"{last_report.get('rows_per_second') or 0:,.0f} rows/s"
    items = (
        f"{len(reports)} report{'s' * (len(reports) != 1)}",
        f"epoch {last_report.get('epoch') or 0:g}",
        *figures,
        rate,
    )
    return f"{name}: {', '.join(items)}, batch {last_report.get('batch', '?')}\n"


def draw_picture(runs: dict[str, dict[str, list[dict[str, Any]]]], picture: Path) -> None:
    """Draw the loss over seconds and over rows, each validation quantity, and the rows per second, into a file."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("drawing needs matplotlib: pip install 'synkhronos[demos]', or take --csv") from None
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    curves: dict[str, list[dict[str, Any]]] = {run: [] for run in runs}
    for record in build_table(runs):
        if record["file"] == "reports" and record.get("loss") is not None:
            validation = {f"validation {name}": value for name, value in (record.get("validation") or {}).items()}
            point = {"seconds": record["seconds"], "rows": record.get("seen"), "loss": record["loss"]}
            curves[record["run"]].append({**point, "rows per second": record.get("rows_per_second"), **validation})
    names = dict.fromkeys(name for points in curves.values() for point in points for name in point)
    validations = [("rows", name) for name in names if name.startswith("validation ")]
    panels = [("seconds", "loss"), ("rows", "loss"), *validations, ("rows", "rows per second")]
    n_columns = min(3, len(panels))
    n_rows = -(-len(panels) // n_columns)
    figure, grid = pyplot.subplots(
        n_rows, n_columns, figsize=(4.3 * n_columns, 3.6 * n_rows), layout="constrained", squeeze=False
    )
    axes = list(grid.flat[: len(panels)])
    for axis in grid.flat[len(panels) :]:
        axis.remove()
    for axis, (x, y) in zip(axes, panels, strict=True):
        for run, points in curves.items():
            marker = "o" if len(points) == 1 else None  # a line of one point is invisible
            # matplotlib draws None, a value that was not measured, as a gap.
            axis.plot([point[x] for point in points], [point.get(y) for point in points], label=run, marker=marker)
        axis.set(xlabel=x, ylabel=y)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        if x == "rows":
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        if y == "rows per second":
            axis.yaxis.set_major_formatter(EngFormatter(sep=""))
            axis.set_ylim(bottom=0)
        if y == "loss":
            axis.set_yscale("log")
            # Ticks are written as 0.6 instead of 6 × 10⁻¹, and ticks between the decades have numbers, too.
            low, high = axis.get_ylim()
            if high < 4 * low:
                axis.yaxis.set_major_locator(MaxNLocator(5))
            elif high < 1000 * low:
                axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", fontsize="small", ncols=4)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
