"""Slow, plain references that the numerics of `t5x` are tested against. They share no code with the package."""
