"""A restored run, client by client: its prompts, and what the model says under each."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.run.reload import become_client, restore
from benchmark.seeds import torch_generator
from datamodules.federated import FederatedDataModule
from methods import FedAvg


def prompted_run(run_dir: Path, data_dir: Path | None, prompt: bool = True) -> tuple[FedAvg, FederatedDataModule]:
    method, data = restore(run_dir, data_dir)
    if not isinstance(method, FedAvg) or (prompt and method.visual_prompt is None):
        wanted = "FedAvg or a method derived from it" + (" with a prompt on the pixels" if prompt else "")
        raise ConfigurationError(f"{run_dir} is a run of {type(method).__name__}; this figure needs {wanted}")
    return method, data


def prompted(method: FedAvg, x: Tensor, seed: int) -> Tensor:
    """Images with the present client's prompt on them; a prompt that wanders stands where the key puts it."""
    noise = method.draw_noise(torch_generator(seed, "figure", "prompt"), len(x), Stage.EVALUATE)
    return method.prompted(x, noise)


def plain_images(colours: NDArray[np.uint8], data: FederatedDataModule) -> Tensor:
    """Images of one colour each, as the backbone sees them: float32 [n, 3, H, W].

    Args:
        colours: [n, 3], 0 to 255.
        data: gives the stored size and the transform.
    """
    height, width = data.pool.images.shape[-2:]
    images = torch.from_numpy(colours)[:, :, None, None].expand(-1, -1, height, width)
    return data.transform(images, None)


@torch.no_grad()
def outputs_under_prompts(method: FedAvg, clients: Sequence[int], x: Tensor, seed: int) -> Tensor:
    """Logits [K, n, C] of the same images [n, 3, H, W] under the prompt (and with the model) of each of K clients."""
    outputs = []
    for client in clients:
        become_client(method, client)
        outputs.append(method(prompted(method, x, seed)))
    return torch.stack(outputs)


def label_shares(data: FederatedDataModule, clients: Sequence[int]) -> NDArray[np.float64]:
    """[K, C]: which part of a client's training images is of each class."""
    counts = data.class_counts[list(clients)].numpy().astype(np.float64)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))
