"""Explain a GPU's own errors, and those of full memory, in one line."""

import re
import traceback

import torch

from benchmark.engine.refusals.author_errors import authors_line
from benchmark.errors import ConfigurationError, causes


def of_device(error: BaseException | None) -> ConfigurationError | None:
    """Say what to do about an error of the device, or of what it was made of; None where it is none known here."""
    for each in causes(error):
        said = str(each).strip().split("\n")[0]
        if isinstance(each, torch.OutOfMemoryError):
            tried = re.search(r"Tried to allocate ([\d.]+ \w+)", said)
            more = "" if tried is None else f", {tried[1]} more were asked for"
            return ConfigurationError(
                f"the GPU's memory is full{more}; step fewer clients at once (--data.clients_at_once), or take "
                "smaller mini-batches (--data.batch_size, in evaluations --data.eval_batch_size); a run's finished "
                "rounds are kept, and benchmark resume goes on from there"
            )
        if isinstance(each, MemoryError) or (isinstance(each, RuntimeError) and "can't allocate memory" in said):
            tried = re.search(r"allocate (\d+) bytes", said)
            more = "" if tried is None else f", {int(tried[1]) / 1e9:,.1f} GB more were asked for"
            return ConfigurationError(
                f"the machine's memory is full{more}; take smaller images (--data.source.init_args.size), step fewer "
                "clients at once (--data.clients_at_once), or keep no features (--data.cache_features=false)"
            )
        operation = re.match(r"(\S+) does not have a deterministic implementation", said)
        if isinstance(each, RuntimeError) and operation:
            frames = traceback.extract_tb(each.__traceback__)
            at = authors_line([(frame.filename, frame.lineno or 0) for frame in frames])
            where = "" if at is None else f" (line {at[1]} of {at[0]})"
            return ConfigurationError(
                f"{operation[1]}{where} has no kernel on a GPU that gives the same bits at each call; take another "
                "one, or --trainer.deterministic=false, with which a resumed run agrees up to rounding alone"
            )
    return None
