"""Oldest GPUs that can run relay; apart from the checks, which import Monarch."""

FLASH_CAPABILITY = (8, 0)
"""Oldest GPUs with kernels for attention in half precision."""
CUDA_CAPABILITY = (7, 5)
"""Oldest for which the builds for CUDA 13 have kernels."""
