import rl.weights  # noqa: F401  (sets Monarch's environment before any module here loads it)
