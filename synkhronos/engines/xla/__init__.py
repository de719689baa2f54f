"""XLA programs: PyTensor's functions in JAX mode, which `XlaEngine` launches, and programs of other libraries.

An `Executable` is one XLA program of one or several PyTensor functions.  It takes the inputs and the values of all
shared variables, and returns the outputs and the variables' new values::

                      ┌────────────────────────── one launch ──────────────────────────┐
    inputs ─────────> │ gradient function ──> exchange (`ExchangeSpec`) ──> update   │ ──> outputs
    shared variables  │                                                    function    │ ──> new values
    (donated) ──────> └────────────────────────────────────────────────────────────────┘

With a sharded optimizer there are two update functions, and collectives after the gradient and between these
(`TracedShardedExchange`).  A `FusedRunner` launches an executable with collectives.  A `SpmdProgram` is a program of
another library, such as a sampler, that all ranks run at the same time.
"""
