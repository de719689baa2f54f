"""Update rules: the name of 2017 for `synkhronos.training.updates`."""

from synkhronos.training.updates import *  # noqa: F403
from synkhronos.training.updates import __all__ as __all__
