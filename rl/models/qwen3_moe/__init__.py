from rl.models.qwen3_moe.registry import model_registry

__all__ = ["model_registry"]
