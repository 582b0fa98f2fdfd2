from rl.models.qwen3.registry import model_registry

__all__ = ["model_registry"]
