import rl.weights  # noqa: F401  (sets Monarch's environment before any module here loads it)
from rl.utils.caches import settle_caches

settle_caches()  # before torch or vllm ask for a folder
