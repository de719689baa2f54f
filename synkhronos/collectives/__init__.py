"""Collectives over shared variables; every rank has its own copy of each.

The functions in `calls` check their arguments in the master (`arguments`) before any rank starts.  Then they run one
command on all ranks (`commands`).
"""
