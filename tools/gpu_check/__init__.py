"""Checks of a GPU machine before its first real run; see `tools.gpu_check.__main__`."""
