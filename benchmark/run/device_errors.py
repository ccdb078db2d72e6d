"""What a GPU's own errors mean for a run, in one line."""

import re

import torch

from benchmark.errors import ConfigurationError, causes


def of_device(error: BaseException | None) -> ConfigurationError | None:
    """Say what to do about an error of the device, or of what it was made of; None where it is none known here."""
    for each in causes(error):
        said = str(each).strip().split("\n")[0]
        if isinstance(each, torch.OutOfMemoryError):
            tried = re.search(r"Tried to allocate ([\d.]+ \w+)", said)
            more = "" if tried is None else f", {tried[1]} more were asked for"
            return ConfigurationError(
                f"the GPU's memory is full{more}; step fewer clients together (--data.cohort_width), or take smaller "
                "mini-batches (--data.batch_size, in evaluations --data.eval_batch_size); rounds that are finished are "
                "kept, and benchmark resume goes on from there"
            )
        operation = re.match(r"(\S+) does not have a deterministic implementation", said)
        if isinstance(each, RuntimeError) and operation:
            return ConfigurationError(
                f"{operation[1]} has no kernel on a GPU that gives the same bits at each call; take another operation, "
                "or --trainer.deterministic=false, with which a resumed run agrees up to rounding alone"
            )
    return None
