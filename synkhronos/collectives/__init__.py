"""Collectives over shared variables; every rank has its own copy of each.

The functions in `api` check their arguments in the master (`arguments`), and then run a command on all ranks
(`commands`, `all_reduce_command`), which `command_cache` makes at the first call.
"""
