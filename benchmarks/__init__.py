"""Benchmarks: each module is a program, ``python -m benchmarks.NAME``, with ``--help``.

A benchmark measures both sides of a comparison alternately within one run, so that other load on the machine affects
both.  It prints a table, and PASS or FAIL for each criterion.  The exit status is always 0, since a busy machine is not
an error.  Modules that begin with ``gpu_`` need GPUs.  Benchmarks run with PyTensor where it is installed, else with
Theano.
"""

from __future__ import annotations

import argparse


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's options, which prints the benchmark's docstring as it is."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
