import rl.weights  # noqa: F401  (sets Monarch's environment before any module here loads it)
from rl.utils.caches import ensure_private_caches
from rl.utils.hidden_packages import hide_unfit_builds

ensure_private_caches()  # before torch or vllm ask for a folder
hide_unfit_builds()  # before vllm or transformers look for them
