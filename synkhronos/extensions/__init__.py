"""Features on top of the library, such as PyMC's models.  ``import synkhronos`` imports none of them.

`updates` and `train` are the names of 2017 for `synkhronos.training.updates` and `synkhronos.training.train_function`.
"""
