"""The update rules, by the name that users import; they are in `synkhronos.training.updates`."""

from synkhronos.training.updates import *  # noqa: F403
from synkhronos.training.updates import __all__ as __all__
