"""The module ``theanompi``: its rules start runs of this library."""

import pkgutil

# Everything else lies in the user's copy, which may be found later than this.
__path__ = pkgutil.extend_path(__path__, __name__)

from .rules import ASGD, BSP, EASGD, GOSGD

__all__ = ["ASGD", "BSP", "EASGD", "GOSGD"]
