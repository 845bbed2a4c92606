"""Mutants: kernels that are wrong on purpose."""
