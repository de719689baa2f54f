"""Make ``import theano`` return PyTensor, or Theano's own module, before any test imports it."""

import importlib.util
import os
import sys
from pathlib import Path

from library import COMPILER, DEVICE, NAME, package

import synkhronos.compat  # noqa: F401 - it prepares ``import theano``

if NAME == "theano":
    package.config.cxx = COMPILER
if DEVICE == "host" and NAME == "pytensor":
    # These tests, and the programs that they start, inspect rewritten graphs.
    package.config.mode, package.config.linker = "FAST_COMPILE", "auto"
    os.environ["PYTENSOR_FLAGS"] = "mode=FAST_COMPILE,traceback__limit=0,gcc__cxxflags=-O0"

sys.path.insert(0, str(Path(__file__).parent))

#: Modules that are about one library.
NEEDS = {
    "pytensor": ["test_cases", "test_examples", "test_import_hooks"],
    "jax": ["test_lengths", "test_ops", "test_precision", "test_streams"],
}
collect_ignore = [
    f"{module}.py"
    for library, modules in NEEDS.items()
    if importlib.util.find_spec(library) is None
    for module in modules
]
