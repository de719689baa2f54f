"""Has PyTensor, or Theano's own module, answer to ``import theano`` before any test imports it."""

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTENSOR_FLAGS", "mode=FAST_COMPILE")

from library import COMPILER, package  # noqa: E402

import synkhronos.compat  # noqa: E402, F401

package.config.cxx = COMPILER

sys.path.insert(0, str(Path(__file__).parent))
