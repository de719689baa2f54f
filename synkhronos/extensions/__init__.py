"""What is built on top of Synkhronos' public names.

`synkhronos.extensions.updates`
    Update rules that train one model on all ranks: another name of `synkhronos.training.updates`.
`synkhronos.extensions.train`
    One callable that takes a training step on all ranks: another name of `synkhronos.training.train_function`.
`synkhronos.extensions.rows_sum`
    A sum over rows as a PyTensor expression, which the ranks compute.
`synkhronos.extensions.by_rows`
    Which part of an expression can be computed row by row.
`synkhronos.extensions.pymc`
    PyMC models whose likelihoods the ranks compute.

None of them is imported by ``import synkhronos``.
"""
