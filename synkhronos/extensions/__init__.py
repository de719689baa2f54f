"""Extensions, built on the public names of Synkhronos; none is imported by ``import synkhronos``.

`updates` and `train` are the names of 2017 for `synkhronos.training.updates` and `synkhronos.training.train_function`.
"""
