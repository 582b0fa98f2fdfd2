"""Registry module with an importance correction for off-policy data."""

from __future__ import annotations

from actors.controller import Controller
from configs.sum_digits import tiny
from losses.correction import ImportanceCorrection
from losses.policy import GRPOLoss


def corrected() -> Controller.Config:
    config = tiny()
    config.trainer.loss = GRPOLoss(correction=ImportanceCorrection(level="sequence"))
    return config
