"""The module ``theano.printing``, on PyTensor."""

from pytensor.printing import Print, debugprint, pp, pprint, pydotprint

__all__ = ["Print", "debugprint", "pp", "pprint", "pydotprint"]
