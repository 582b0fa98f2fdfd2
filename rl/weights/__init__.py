import rl.weights.monarch_env  # noqa: F401  (before any module here loads Monarch)
