"""A registry module whose config corrects for data of other policies."""

from __future__ import annotations

from actors.controller import Controller
from configs.sum_digits import tiny
from losses.correction import ImportanceCorrection
from losses.grpo import GRPOLoss


def corrected() -> Controller.Config:
    config = tiny()
    config.trainer.loss = GRPOLoss(correction=ImportanceCorrection(level="sequence"))
    return config
