"""Has PyTensor, or Theano's own module, answer to ``import theano`` before any test imports it."""

import importlib.util
import sys
from pathlib import Path

from library import COMPILER, package

import synkhronos.compat  # noqa: F401

package.config.cxx = COMPILER

sys.path.insert(0, str(Path(__file__).parent))

#: Modules that are about one library.
NEEDS = {
    "pytensor": ["check_cases", "check_examples", "check_import_hooks"],
    "jax": ["check_lengths", "check_ops", "check_precision", "check_streams"],
}
collect_ignore = [
    f"{module}.py"
    for library, modules in NEEDS.items()
    if importlib.util.find_spec(library) is None
    for module in modules
]
