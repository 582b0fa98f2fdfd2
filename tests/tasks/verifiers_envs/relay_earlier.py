"""Environment for verifiers before 0.4, which has no Taskset."""


def load_environment(): ...
