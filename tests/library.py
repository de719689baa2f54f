"""The graph library of this environment, under one set of names."""

try:
    import pytensor as package
    import pytensor.tensor as tensor
except ImportError:
    import theano as package
    import theano.tensor as tensor

#: "pytensor" or "theano"
NAME = package.__name__
shared = package.shared
function = package.function
grad = package.grad

__all__ = ["NAME", "function", "grad", "package", "shared", "tensor"]
