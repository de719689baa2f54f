"""The module ``theano.scan_module``, on PyTensor: loops."""

import warnings
from collections.abc import Callable
from typing import Any

from pytensor.scan import basic, views
from pytensor.scan.utils import until
from theano.updates import OrderedUpdates


def _return_updates(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop that returns its outputs and its updates, as Theano's loops do."""

    def loop(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning, module="pytensor")
            warnings.filterwarnings("ignore", ".*return_updates", DeprecationWarning)
            outputs, updates = function(*args, return_updates=True, **kwargs)
        return outputs, OrderedUpdates(updates)

    loop.__name__ = loop.__qualname__ = function.__name__
    loop.__doc__ = f"Call `pytensor.scan.{function.__name__}`; returns the outputs and the updates."
    return loop


scan = _return_updates(basic.scan)
map = _return_updates(views.map)
reduce = _return_updates(views.reduce)
foldl = _return_updates(views.foldl)
foldr = _return_updates(views.foldr)

from theano.scan_module import scan_utils
