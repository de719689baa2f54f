"""Ops of neural networks that PyTensor lacks, computed by NumPy and by XLA."""
