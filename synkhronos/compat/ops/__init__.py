"""What neural networks need of Ops that PyTensor lacks, by NumPy and by XLA."""
