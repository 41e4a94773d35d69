"""`t5x doctor`: checks whether a machine is ready, with a fix for everything that is not.

A topic is a module with `check(args)`, which yields findings.
"""
