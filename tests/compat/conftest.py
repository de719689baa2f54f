"""These tests ask for PyTensor in Theano's place; in Theano's own environment only those about Theano run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

try:
    import pytensor  # noqa: F401
except ImportError:
    collect_ignore = ["test_cases.py", "test_hook.py", "test_ops.py", "test_streams.py"]
else:
    import synkhronos.compat  # noqa: F401
