"""A registry module for the tests."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.models.converters.lora import LoRA


def tiny() -> Controller.Config:
    return sum_digits.tiny()


def tiny_lora() -> Controller.Config:
    config = sum_digits.tiny()
    config.trainer.converters = (LoRA.Config(rank=2, alpha=8.0),)
    return config
