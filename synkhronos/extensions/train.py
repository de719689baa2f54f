"""Training functions, by the name that users import; they are in `synkhronos.training`."""

from synkhronos.training.train_function import *  # noqa: F403
from synkhronos.training.train_function import __all__ as __all__
