"""The cell compiler: a step in, its value, gradient and C out."""

from whorl.cells import torch_functions as torch_functions  # with it, expressions answer torch's own functions
