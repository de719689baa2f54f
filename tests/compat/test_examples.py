"""The examples in docstrings of `synkhronos.compat` run, and print the stated output."""

import doctest
import importlib
import io
from pathlib import Path

import pytest

pytest.importorskip("pytensor")

import numpy as np
import pytensor
import theano
import theano.tensor as T
from theano.tensor.signal import conv, pool

import synkhronos.compat

ROOT = Path(synkhronos.compat.__file__).parent
# Names that examples need not import.
NAMES = {"T": T, "conv": conv, "np": np, "pool": pool, "pt": pytensor.tensor, "pytensor": pytensor, "theano": theano}


def list_modules():
    """Return the names of all modules, those of Theano by the names that programs see."""
    for file in sorted(ROOT.rglob("*.py")):
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        head = [] if parts[0] == "theano" else ["synkhronos", "compat"]
        yield ".".join(head + (parts[:-1] if parts and parts[-1] == "__init__" else parts))


def find_examples():
    for name in list_modules():
        module = importlib.import_module(name)
        for test in doctest.DocTestFinder().find(module, name, globs={**NAMES, **vars(module)}):
            if test.examples:
                yield test


@pytest.mark.parametrize("example", find_examples(), ids=lambda test: test.name)
def test_docstring_example_prints_its_output(example):
    report = io.StringIO()
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.write)
    assert failed == 0, report.getvalue()


def test_docstrings_have_examples():
    assert len(list(find_examples())) > 10
