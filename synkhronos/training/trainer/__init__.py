"""Trainers: epochs over data on all ranks, by an exchange rule."""

from synkhronos.training.trainer.trainer import Trainer, make_trainer

__all__ = ["Trainer", "make_trainer"]
