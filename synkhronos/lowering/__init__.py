"""Lowerings of PyTensor's graphs to JAX that replace or extend PyTensor's own.

An engine runs a `jax_function.JaxFunction`.  `linker` makes lengths that depend on integer inputs static arguments.
`shapes`, `precision` and `scatter` replace lowerings of single Ops; `dtypes` keeps the dtypes of the graph.

Modules that need PyTensor are imported with PyTensor only: nothing here is used with Theano.
"""
