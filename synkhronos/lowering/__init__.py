"""Translation of PyTensor's graphs to JAX, where PyTensor's own translation falls short.

- `lengths`, `shapes`, `linker`: lengths that follow from integer inputs, which XLA needs as constants.
- `traced`: a compiled function as a function of JAX arrays.
- `precision`: factors of products in bfloat16.
- `scatter`, `sums`: faster or more exact translations of single operations.

Imported with PyTensor only: nothing here is needed with Theano.
"""
