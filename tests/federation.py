"""A tiny federation for tests: eleven ragged clients, 8 classes of synthetic images, and how to run a method on it."""

import copy
import os
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import yaml
from jsonargparse import ActionConfigFile
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from benchmark.backbones.vit import PromptedViT, TimmViT
from benchmark.checks.methods import EACH_ROUND as EACH_ROUND
from benchmark.checks.methods import clients_and_server as clients_and_server
from benchmark.checks.methods import learned as learned
from benchmark.checks.methods import run_rounds
from benchmark.config.parser import FederatedParser
from benchmark.engine.plan.work import Share, Step
from benchmark.federation import Round, Terms, Uploads, Values
from benchmark.method import FederatedMethod
from benchmark.run.cli import FederatedCLI
from benchmark.server import ServerRule
from datamodules.federated import FederatedDataModule
from datamodules.partition import ClientSplits, Partition
from datamodules.source import ImagePool, ImageSource

CONF = Path(__file__).parent / "conf"
fit = run_rounds
SIZES = (5, 4, 9, 3, 6, 7, 2, 10, 1, 4, 8)


class TinyImages(ImageSource):
    """Noise around one random picture a class, 32 x 32."""

    class_names = tuple(f"class{c}" for c in range(8))

    def __init__(self, size: int = 32) -> None:
        self.size = size

    def load(self) -> ImagePool:
        """176 images, 22 of each class, half of them test images."""
        rng = np.random.default_rng(7)
        labels = np.tile(np.arange(8), 22)
        means = rng.integers(60, 190, (8, 3, self.size, self.size))
        noise = rng.integers(-50, 50, (len(labels), 3, self.size, self.size))
        images = np.clip(means[labels] + noise, 0, 255).astype(np.uint8)
        return ImagePool(
            images=torch.from_numpy(images),
            labels=torch.from_numpy(labels),
            test=torch.arange(len(labels)) >= 110,
            domains=torch.zeros(len(labels), dtype=torch.int64),
            group=torch.arange(len(labels)),
        )


class ForeignImages(ImageSource):
    """Stripes, of another size than the federation's images."""

    class_names = ("lying", "standing")

    def load(self) -> ImagePool:
        """24 images of 24 x 24, half of each class, with stripes of different widths and grounds."""
        numbers = torch.arange(24)
        stripes = (torch.arange(24) // (1 + numbers // 4)[:, None]) % 2
        images = (255 - 10 * numbers)[:, None, None] * stripes[:, None, :].expand(-1, 24, -1)
        images[1::2] = images[1::2].transpose(1, 2)
        return ImagePool(
            images=images.to(torch.uint8)[:, None].expand(-1, 3, -1, -1).contiguous(),
            labels=1 - numbers % 2,
            test=numbers % 3 == 0,
            domains=torch.zeros(24, dtype=torch.int64),
            group=numbers,
        )


class Ragged(Partition):
    """Clients of very different sizes; each is tested on six images."""

    sizes: ClassVar[tuple[int, ...]] = SIZES
    tested: ClassVar[tuple[int, ...]] = (6,) * len(SIZES)

    def __init__(self, num_clients: int = 11) -> None:
        self.num_clients = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Consecutive runs of the pool."""
        train, test = (
            np.split(np.arange(start, start + sum(sizes)), np.cumsum(sizes)[:-1])
            for start, sizes in ((0, self.sizes[: self.num_clients]), (110, self.tested[: self.num_clients]))
        )
        return ClientSplits([t.astype(np.int64) for t in train], [t.astype(np.int64) for t in test])


class Longer(Ragged):
    """Clients of more images, for claims about several steps in a row."""

    sizes = (9, 4, 17, 3, 8, 12, 5, 20, 1, 6, 11)


class Short(Ragged):
    """Clients whose few steps do not end together."""

    sizes = (7, 3, 9)


class Even(Ragged):
    """Six clients whose mini-batches of four are all full."""

    sizes = (4, 8, 4, 4, 8, 4)
    tested = (2,) * 6

    def __init__(self, num_clients: int = 6) -> None:
        super().__init__(num_clients)


class Few(Ragged):
    """Six clients with one image, less than a batch of four, exactly one, and several whose last is not full.

    So are their test images. Every method is asked eleven things of them; four clients of a round are two cohorts.
    """

    sizes = (5, 1, 6, 3, 4, 2)
    tested = (6, 2, 3, 1, 4, 2)

    def __init__(self, num_clients: int = 6) -> None:
        super().__init__(num_clients)


class ShallowViT(TimmViT):
    """A ViT of fewer layers than it has in timm: by default a first, one in between, and a last."""

    def __init__(
        self,
        name: str = "test_vit",
        weights: Literal["hub", "file", "random", "embedded"] = "random",
        checkpoint_path: str | None = None,
        image_size: int = 32,
        depth: int = 3,
    ) -> None:
        super().__init__(name, weights, checkpoint_path, image_size)
        vit = self.vit
        vit.blocks = vit.blocks[:depth]
        PromptedViT.__init__(self, vit)


class StopAfterTwo(Callback):
    """Asks the Trainer to stop in the second round."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask it as the round begins; it is heard at the round's end."""
        trainer.should_stop = trainer.current_epoch == 1


def terms(
    clients: int, participants: int | None = None, seed: int = 0, classes: int = 8, batch_size: int = 4, row: int = 4
) -> Terms:
    """The terms of a federation without any images, for a rule or a plan that is tested alone."""
    return Terms(
        seed=seed,
        num_clients=clients,
        training_clients=tuple(range(clients)),
        new_clients=(),
        participants=clients if participants is None else participants,
        batch_size=batch_size,
        drop_last=False,
        eval_batch_size=4,
        num_classes=classes,
        row=row,
        own_row=row,
    )


class Witness(ServerRule):
    """FedAvg's server that remembers what it has received, a round after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Uploads] = []

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Remember the uploads."""
        self.seen.append(uploads)
        return super().aggregate(round, shared, uploads)

    @property
    def last(self) -> dict[int, Values]:
        """Per client, what it has uploaded last."""
        return {
            client: {name: value[row] for name, value in uploads.values.items()}
            for uploads in self.seen
            for row, client in enumerate(uploads.clients)
        }


def first_step(share: Share) -> Step:
    """The first step that a rank takes."""
    work = next(iter(share))
    return next(work.steps(work.parts[0], torch.device("cpu")))[0]


#: Arguments of the data that no method's constructor sees.
AFTERWARDS = {
    "batch_size",
    "cache_features",
    "clients_per_round",
    "clients_at_once",
    "drop_last",
    "eval_batch_size",
    "evaluate_local",
    "num_workers",
    "participation",
}


def build(conf: str, *overrides: str) -> tuple[Any, FederatedDataModule]:
    """Make method and data of ``tests/conf/<conf>.yaml`` on the tiny federation.

    Reading a command line takes most of a second. So a method is made once and copied for all that ask for it with the
    same options, but for some of the data; the copy, and the state of the global generators, are the same to the bit.
    Those of the last eight command lines are kept, up to 25 MB each: a test that asks again does so soon.
    """
    afterwards: dict[str, Any] = {}
    key = []
    for override in overrides:
        name, _, value = override.removeprefix("--data.").partition("=")
        if override.startswith("--data.") and name in AFTERWARDS:
            afterwards[name] = yaml.safe_load(value)
        else:
            key.append(override)
    place = (conf, *key, *TinyImages.class_names)  # whose names a test may change
    if place not in _made:
        if len(_made) == 8:
            _made.pop(next(iter(_made)))
        _made[place] = _Made.by_command_line(conf, overrides)
    return _made[place].copied(conf, afterwards)


@lru_cache(maxsize=128)
def _data_of(conf: str) -> dict[str, Any]:
    """Read what the files say of the data."""
    base, own = (yaml.safe_load((CONF / f"{name}.yaml").read_text()).get("data", {}) for name in ("base", conf))
    return base | own


@lru_cache(maxsize=1)
def _parser() -> FederatedParser:
    """Of ``lightning-cli``'s options without the Trainer's, which take longer to read than all others."""
    parser, cli = FederatedParser(), object.__new__(FederatedCLI)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_argument("--trainer", type=dict)
    parser.add_lightning_class_args(FederatedMethod, "model", subclass_mode=True)
    parser.add_lightning_class_args(FederatedDataModule, "data")
    cli.add_default_arguments_to_parser(parser)
    cli.add_arguments_to_parser(parser)
    return parser


@dataclass(frozen=True)
class _Made:
    """The objects that a command line makes, before any use.

    Attributes:
        method: method as constructed.
        data: data as constructed.
        plain: further arguments of the data.
        drawn: states of the global generators afterwards, and the variable that holds the seed.
    """

    method: Any
    data: FederatedDataModule
    plain: dict[str, Any]
    drawn: tuple[Any, ...]

    @classmethod
    def by_command_line(cls, conf: str, overrides: tuple[str, ...]) -> "_Made":
        """Read it, and make what it says."""
        args = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / f"{conf}.yaml"), *overrides]
        config = _parser().parse_args(args)
        seed_everything(config.seed_everything, workers=True)
        made = _parser().instantiate_classes(config)
        others = {"source", "partition", "transform", "record_privacy", "ood", "corruptions", *AFTERWARDS}
        plain = {name: value for name, value in vars(config.data).items() if name not in others}
        states = (torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002  Lightning seeds it
        return cls(made.model, made.data, plain, (*states, os.environ["PL_GLOBAL_SEED"]))

    def copied(self, conf: str, afterwards: dict[str, Any]) -> tuple[Any, FederatedDataModule]:
        """Copies, of the data with other arguments."""
        torch_state, numpy_state, python_state, os.environ["PL_GLOBAL_SEED"] = self.drawn
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        configured = {name: value for name, value in _data_of(conf).items() if name in AFTERWARDS}
        objects = copy.deepcopy((self.data.source, self.data.partition, self.data._transform))
        made = {name: getattr(self.data, name) for name in ("record_privacy", "ood", "corruptions")}
        data = FederatedDataModule(*objects, **self.plain | made | configured | afterwards)
        data.setup()
        tokenizers = (module.tokenizer for module in self.method.modules() if hasattr(module, "tokenizer"))
        return copy.deepcopy(self.method, {id(each): each for each in tokenizers}), data


_made: dict[tuple[str, ...], _Made] = {}
