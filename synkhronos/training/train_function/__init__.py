"""Training functions: a training step on all ranks as one callable."""

from synkhronos.training.train_function.serial_train_function import SerialTrainFunction, make_train_function_serial
from synkhronos.training.train_function.train_function import TrainFunction, make_train_function

__all__ = ["SerialTrainFunction", "TrainFunction", "make_train_function", "make_train_function_serial"]
