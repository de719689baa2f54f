"""Paths of this repository and of tests/support."""

from pathlib import Path

#: Folder of modules that tests import; pytest adds it to ``sys.path`` (pyproject.toml).
SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
