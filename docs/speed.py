"""Draws the ratios of speed.csv: ``python docs/speed.py`` writes speed_light.svg and speed_dark.svg beside it.

The pictures carry the digest of the table that they were drawn from, so that a test can tell when they are out of date.
"""

import csv
import hashlib
from pathlib import Path

import matplotlib

TABLE = Path(__file__).with_name("speed.csv")
#: Text, lighter text, grid, a gain, a loss.
COLOURS = {
    "light": ("#222832", "#5a6472", "#c9ced6", "#1b6f8f", "#b5553c"),
    "dark": ("#ced6dd", "#9aa5b1", "#48566b", "#5fb3d4", "#e08a6d"),
}

#: Ratios at the edges.
LEFT, RIGHT = 0.14, 3.6


def digest() -> str:
    """Return the digest of the table."""
    return hashlib.sha256(TABLE.read_bytes()).hexdigest()


def draw(rows: list[dict[str, str]], theme: str) -> None:
    """Draw a bar for each row, from equal speed to its ratio, with the row's name above it."""
    from matplotlib import pyplot

    text, lighter, grid, gain, loss = COLOURS[theme]
    figure, axis = pyplot.subplots(figsize=(7, 0.56 * len(rows) + 0.6), layout="constrained")
    for i, row in enumerate(rows):
        ratio = float(row["Times as fast"])
        colour = gain if ratio >= 1 else loss
        axis.barh(i, ratio - 1, left=1, height=0.36, color=colour)
        axis.text(LEFT, i - 0.22, f"{row['Work']}, {row['On']}", color=text, va="bottom", fontsize=10.5)
        axis.text(RIGHT, i - 0.22, f"beside {row['Beside']}", color=lighter, va="bottom", ha="right", fontsize=10.5)
        end = max(ratio, 1) * 1.03
        axis.text(end, i, row["Times as fast"], color=colour, va="center", fontsize=11, weight="bold")
    axis.set_facecolor("none")
    axis.axvline(1, color=text, linewidth=1)
    axis.set_xscale("log")
    axis.set_xlim(LEFT, RIGHT)
    axis.set_ylim(len(rows) - 0.5, -0.8)
    ticks = [0.25, 0.5, 1, 2, 3]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], color=text)
    axis.set_xticks([], minor=True)
    axis.set_yticks([])
    axis.set_xlabel("times as fast as the other", color=text, fontsize=10.5)
    axis.tick_params(color=grid, labelsize=10)
    for spine in axis.spines.values():
        spine.set_visible(False)
    metadata = {"Date": None, "Creator": None, "Description": f"speed.csv {digest()}", "Title": "Speed"}
    figure.savefig(
        TABLE.with_name(f"speed_{theme}.svg"), facecolor="white" if theme == "light" else "none", metadata=metadata
    )
    pyplot.close(figure)


def main() -> None:
    """Draw both pictures."""
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "speed"
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for theme in COLOURS:
        draw(rows, theme)


if __name__ == "__main__":
    main()
