"""The module ``theano.scan_module.scan_op``, on PyTensor: the Op of loops."""

from pytensor.scan.op import Scan

# Theano's names for the variables of a step.
Scan.inputs = property(lambda self: self.inner_inputs)
Scan.outputs = property(lambda self: self.inner_outputs)
