"""Lowerings of PyTensor's graphs to JAX that replace or extend PyTensor's own.

An engine runs a `jax_function.JaxFunction`.  PyTensor's part is done by `linker`, which makes lengths that follow from
integer inputs static arguments.  The lowerings of single Ops in `shapes`, `precision` and `scatter` replace PyTensor's.

Modules that need PyTensor are imported with PyTensor only: nothing here is used with Theano.
"""
