"""Training functions: the name of 2017 for `synkhronos.training.train_function`."""

from synkhronos.training.train_function import *  # noqa: F403
from synkhronos.training.train_function import __all__ as __all__
