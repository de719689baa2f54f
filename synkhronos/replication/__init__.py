"""Copies of the master's objects on all ranks: shared variables, functions, and user code in them."""
