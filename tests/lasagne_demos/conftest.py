"""Make the demos' modules importable, and Theano's convolutions fast enough for tests."""

import sys
from pathlib import Path

import pytest
import theano_convolutions  # noqa: F401 - before anything imports theano
from library import COMPILER, NAME, package

if NAME == "theano":
    package.config.cxx = COMPILER
DEMOS = Path(__file__).resolve().parents[2] / "demos"
sys.path[1:1] = [str(DEMOS / folder) for folder in ("", "mnist", "lasagne_mnist", "resnet")]


@pytest.fixture
def float64():
    """Use double precision, for numerical gradients."""
    from lasagne_tools.library import theano

    theano.config.floatX = "float64"
    yield
    theano.config.floatX = "float32"
