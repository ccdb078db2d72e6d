"""The comparison's federation in pfl (pfl-research), on its own fastest data format; prints one line of JSON.

On several processor cores either one process with as many threads, or several processes with one thread each::

    python pfl_cifar10.py --cores 2
    python -m torch.distributed.run --standalone --nproc_per_node 2 pfl_cifar10.py --cores 2
"""

import json
from dataclasses import asdict
from importlib.metadata import version

import numpy as np
import torch
import torch.nn.functional as F
from cifar10_setting import (
    BATCH,
    EVALUATION_BATCH,
    LR,
    Measured,
    Setting,
    device,
    layers,
    make_images,
    normalise,
    now,
    read_setting,
    versions,
)
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Network(nn.Sequential):
    """The network with the two functions that pfl asks for; it counts its steps and sums their losses."""

    def __init__(self) -> None:
        super().__init__(*layers())
        self.steps = 0
        self.total = torch.zeros((), device=device())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of a mini-batch."""
        self.train()
        loss = F.cross_entropy(self(x), y)
        self.steps += 1
        self.total += loss.detach()
        return loss

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Accuracy."""
        self.eval()
        return {"accuracy": Weighted((self(x).argmax(1) == y).sum().item(), len(y))}


class Clock(TrainingProcessCallback):
    """Times rounds, and the central evaluation apart from them."""

    def __init__(self, network: Network, evaluation: CentralEvaluationCallback) -> None:
        self.network = network
        self.evaluation = evaluation
        self.rounds: list[float] = []
        self.evaluations: list[float] = []
        self.losses: list[float] = []
        self.accuracy = float("nan")
        self.steps = 0
        self.began = 0.0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Evaluate what training begins with."""
        self._evaluated(now(), self.evaluation.on_train_begin(model=model))
        self.began = now()
        return Metrics()

    def _evaluated(self, began: float, metrics: Metrics) -> None:
        for name, value in metrics:
            if "accuracy" in str(name):
                self.accuracy = float(value.overall_value)
                self.evaluations.append(now() - began)

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round has ended."""
        self.rounds.append(now() - self.began)
        self.steps = self.network.steps
        self.losses.append(float(self.network.total) / self.steps)
        self.network.steps = 0
        self.network.total.zero_()
        began = now()
        _, metrics = self.evaluation.after_central_iteration(
            aggregate_metrics, model, central_iteration=central_iteration
        )
        self._evaluated(began, metrics)
        self.began = now()
        return False, Metrics()


def run(setting: Setting, cores: int) -> Measured:
    """Train and measure."""
    processes = distributed.world_size
    torch.set_num_threads(max(1, cores // processes))
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  (pfl draws its users from the global generator)
    images, labels = make_images(setting)
    # Whole tensors on the device: pfl's own benchmark moves them there once, too.
    x, y = normalise(images).to(device()), labels.to(device())
    split = setting.clients * setting.images
    users = [(x[k : k + setting.images], y[k : k + setting.images]) for k in range(0, split, setting.images)]
    training = FederatedDataset.from_slices(users, get_user_sampler("random", range(len(users))))
    central = Dataset((x[split:], y[split:]))
    network = Network()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    evaluating = NNEvalHyperParams(local_batch_size=EVALUATION_BATCH)
    clock = Clock(network, CentralEvaluationCallback(central, evaluating, setting.evaluate_every))
    FederatedAveraging().run(
        # Its evaluation of every client before and after training is needless work: only in the round not counted.
        NNAlgorithmParams(
            central_num_iterations=setting.rounds,
            evaluation_frequency=setting.rounds,
            train_cohort_size=setting.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(training, training, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        evaluating,
        [clock],
        send_metrics_to_platform=False,  # it would print them
    )
    return Measured(
        rounds=clock.rounds,
        evaluations=clock.evaluations,
        losses=clock.losses,
        steps=clock.steps * processes,
        parameters=sum(p.numel() for p in network.parameters()),
        accuracy=clock.accuracy,
        processes=processes,
        threads=torch.get_num_threads(),
        versions=versions("pfl", version("pfl")),
    )


if __name__ == "__main__":
    measured = run(*read_setting())
    if distributed.global_rank == 0:
        print(json.dumps(asdict(measured)), flush=True)
