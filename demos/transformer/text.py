"""Characters of a text as integers: windows to train on, windows to validate with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    """A text in windows of equal length."""

    #: The characters of the text, sorted; a character's index here is its number.
    alphabet: str
    #: Characters, and for each the one that follows it: int32 of shape (windows, length).
    train: tuple[np.ndarray, np.ndarray]
    valid: tuple[np.ndarray, np.ndarray]


def read_text(path: Path | None) -> str:
    """Return the text of a file; by default, the reference of the language that Python ships for ``help()``."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def load_text(path: Path | None, length: int, characters: int | None = None) -> Text:
    """Return the beginning of a file, or of Python's help texts, in windows; the last tenth is for validation."""
    text = read_text(path)[:characters]
    alphabet = "".join(sorted(set(text)))
    lookup = np.zeros(ord(alphabet[-1]) + 1, "int32")
    lookup[[ord(character) for character in alphabet]] = np.arange(len(alphabet))
    numbers = lookup[[ord(character) for character in text]]
    count = (len(numbers) - 1) // length
    if count < 10:
        raise ValueError(f"the text has {len(text):,} characters: too few for ten windows of {length}")
    x = numbers[: count * length].reshape(count, length)
    y = numbers[1 : count * length + 1].reshape(count, length)
    first_valid = count - count // 10
    return Text(alphabet, (x[:first_valid], y[:first_valid]), (x[first_valid:], y[first_valid:]))
