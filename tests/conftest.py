"""Settings of all tests: one thread (the tests' tensors are tiny), and quiet libraries."""

import logging

import torch

torch.set_num_threads(1)
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
