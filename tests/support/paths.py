"""Folders that tests and the programs they start look for."""

from pathlib import Path

#: Modules that tests import; pytest puts it on the path (pyproject.toml).
SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
