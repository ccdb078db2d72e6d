"""Helpers for the tests of the text-prompt methods: runs, a mini-batch, and open_clip's own path."""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from federation import EACH_ROUND, build, fit, learned
from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, MiniBatch
from benchmark.federation import Round

ONE = ["--data.partition.init_args.num_clients=1", "--data.clients_per_round=1"]
#: One step an epoch, on all images of a client; plain SGD.
FULL = ["--data.batch_size=64", "--model.init_args.training.momentum=0", "--model.init_args.training.lr=0.05"]
BASE_TO_NOVEL = [
    "--data.partition=datamodules.partition_few_shot.BaseToNovel",
    "--data.partition.init_args.num_clients=4",
    "--data.partition.init_args.shots=3",
    "--data.clients_per_round=4",
    "--data.eval_batch_size=64",
]


@lru_cache(maxsize=10)
def run(conf: str, *overrides: str, rounds: int = 2, each: bool = False) -> Any:
    """The method after a federation, evaluated after its last round or before and after each; made once."""
    method, data = build(conf, *overrides)
    fit(method, data, rounds, settings=EACH_ROUND if each else None)
    return method


def metrics(method: Any) -> dict[str, Tensor]:
    """Return the recorded metrics: a value for each client, by round, point, split and metric."""
    return {name: value for name, value in learned(method).items() if name.startswith("metric.")}


def assert_same_scores(left: Any, right: Any) -> None:
    """The same metrics; losses up to rounding, which differs between one prompt for all clients and one for each."""
    made, expected = metrics(left), metrics(right)
    assert made.keys() == expected.keys()
    for name, value in made.items():
        tolerance = 2e-5 if "loss" in name else 0.0
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, equal_nan=True)


def alone(conf: str, *overrides: str) -> tuple[Any, MiniBatch]:
    """A method with its label spaces, and twelve training images."""
    method, data = build(conf, *overrides)
    data.setup()
    method.join(data)
    x = data.transform(data.pool.images[:12], None)
    labels, mask = data.pool.labels[:12], torch.arange(12) < 11
    return method, MiniBatch(x, labels, mask, features=method.frozen_features(x))


def client_of(method: Any, received: dict[str, Tensor], prepared: dict[str, Tensor]) -> Client:
    """The client whose parameters are the method's own."""
    parameters = {name: method.get_parameter(name) for name in method.roles.trained}
    counts = torch.zeros(8, dtype=torch.int64)
    return Client(parameters, received, counts, Round(1, (), 0), prepared=prepared)


def open_clip_text(clip: PromptedCLIP, names: list[str], context: Tensor) -> Tensor:
    """CoOp's prompts through open_clip's own blocks: every position of every class, features [C, e]."""
    model, count = clip.model, len(context)
    tokens = clip.tokenizer([" ".join(["X"] * count + [f"{n}."]) for n in names], context_length=clip.context_length)
    x = model.token_embedding(tokens)
    x = torch.cat([x[:, :1], context.expand(len(x), -1, -1), x[:, 1 + count :]], dim=1) + model.positional_embedding
    x = model.ln_final(model.transformer(x, attn_mask=model.attn_mask))
    return F.normalize(x[torch.arange(len(x)), tokens.argmax(dim=1)] @ model.text_projection, dim=-1)
