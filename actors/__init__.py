import rl.weights  # noqa: F401  (sets Monarch's environment before any module here loads it)
from rl.utils.caches import ensure_private_caches

ensure_private_caches()  # before torch or vllm ask for a folder
