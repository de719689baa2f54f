"""Draws the ratios of speed.csv: ``python docs/speed.py`` writes speed_light.svg, speed_dark.svg, and two for phones.

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


def compute_digest() -> str:
    """Return the digest of the table."""
    return hashlib.sha256(TABLE.read_bytes()).hexdigest()


def draw(rows: list[dict[str, str]], theme: str, is_narrow: bool) -> None:
    """Draw a bar for each row, from equal speed to its ratio, with the row's name above it.

    The other program's name is at the right, or in a narrow picture below the row's name.
    """
    from matplotlib import pyplot

    text, lighter, grid, gain, loss = COLOURS[theme]
    size = (4, 0.74 * len(rows) + 0.6) if is_narrow else (7, 0.56 * len(rows) + 0.6)
    bar, top = (0.28, -0.42) if is_narrow else (0.36, -0.22)
    other = {"x": LEFT, "y": -0.18, "ha": "left"} if is_narrow else {"x": RIGHT, "y": top, "ha": "right"}
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    for i, row in enumerate(rows):
        ratio = float(row["Times as fast"])
        colour = gain if ratio >= 1 else loss
        axis.barh(i, ratio - 1, left=1, height=bar, color=colour)
        axis.text(LEFT, i + top, f"{row['Work']}, {row['On']}", color=text, va="bottom", fontsize=10.5)
        axis.text(
            other["x"], i + other["y"], f"versus {row['Compared with']}",
            color=lighter, va="bottom", ha=other["ha"], fontsize=10.5,
        )  # fmt: skip
        end = max(ratio, 1) * 1.03
        axis.text(end, i, row["Times as fast"], color=colour, va="center", fontsize=11, weight="bold")
    axis.set_facecolor("none")
    if is_narrow:  # a whole line would cross the names
        axis.vlines(
            [1] * len(rows), [i - 0.2 for i in range(len(rows))], [i + 0.2 for i in range(len(rows))], color=text
        )
    else:
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
    metadata = {"Date": None, "Creator": None, "Description": f"speed.csv {compute_digest()}", "Title": "Speed"}
    name = f"speed_{theme}_narrow.svg" if is_narrow else f"speed_{theme}.svg"
    figure.savefig(TABLE.with_name(name), facecolor="white" if theme == "light" else "none", metadata=metadata)
    pyplot.close(figure)


def main() -> None:
    """Draw all pictures."""
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "speed"
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for theme in COLOURS:
        draw(rows, theme, is_narrow=False)
        draw(rows, theme, is_narrow=True)


if __name__ == "__main__":
    main()
