"""Environment of a generator's processes, in a module that imports nothing."""

from __future__ import annotations

ENVIRONMENT = {
    # The engine runs in this process, which owns its weights.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The model runner whose batch our sampler reads; the newer one needs triton.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # The dots of its float32 kernels would round to TF32 on a GPU; half precision is not affected.
    "TRITON_F32_DEFAULT": "ieee",
    # FlashInfer's all-reduce is compiled with nvcc in the first step, which a run does not need.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
"""Environment variables that vllm and Triton read when they are imported or compile."""
