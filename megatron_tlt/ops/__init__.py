"""Tensor mathematics on torch alone; a process group comes in as an argument."""
