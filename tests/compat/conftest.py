"""Has PyTensor, or Theano's own module, answer to ``import theano`` before any test imports it."""

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTENSOR_FLAGS", "mode=FAST_COMPILE")

import synkhronos.compat  # noqa: E402, F401

sys.path.insert(0, str(Path(__file__).parent))
