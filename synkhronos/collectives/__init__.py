"""Collectives over shared variables, of which every rank has its own copy.

The functions in `calls` check their arguments in the master (`arguments`) before any rank starts.  Then they run one
command on all ranks (`commands`).
"""
