"""Everything that setuptools needs is in pyproject.toml."""

from setuptools import setup

setup()
