"""Draw the noise of a step, for each client on a key of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmark.contract import ClientMethod, Stage
from benchmark.engine.plan.work import Shown, Step
from benchmark.engine.refusals.author_errors import tensors
from benchmark.engine.roles import overrides
from benchmark.federation import Values
from benchmark.seeds import drawn_in_float32, torch_generator


def drawn_noise(method: ClientMethod, seed: int, step: Step, batch_size: int, like: Tensor) -> Values:
    """Draw what a method's step needs of chance, for each client on its own key.

    Args:
        method: says what by ``draw_noise``.
        seed: of the run.
        step: whose and when.
        batch_size: B.
        like: a tensor of the device and of the type that numbers get; they are drawn in float32.

    Returns:
        Per name [K, ...]; nothing where nothing is needed.
    """
    of = (step.stage.value, step.point, step.split, step.round, step.phase, step.number)
    key = of if step.shown is Shown.OWN else (*of, step.shown.value)
    return _drawn(method, seed, key, step.clients, step.stage, batch_size, like)


def message_noise(
    method: ClientMethod, seed: int, round: int, clients: Sequence[int], batch_size: int, like: Tensor
) -> Values:
    """Draw what the messages of these clients at a round's end need of chance; see :func:`drawn_noise`."""
    return _drawn(method, seed, (Stage.MESSAGE.value, round), clients, Stage.MESSAGE, batch_size, like)


def _drawn(
    method: ClientMethod,
    seed: int,
    key: tuple[str | int, ...],
    clients: Sequence[int],
    stage: Stage,
    batch_size: int,
    like: Tensor,
) -> Values:
    if not overrides(method, "draw_noise"):
        return {}
    drawn: list[Values] = []
    with drawn_in_float32():
        for client in clients:
            generator = torch_generator(seed, "noise", *key, client, device=like.device)
            drawn.append(tensors(method, "draw_noise", method.draw_noise(generator, batch_size, stage)))
            if not drawn[0]:
                return {}
    stacked = {name: torch.stack([own[name] for own in drawn]) for name in drawn[0]}
    return {name: v.to(like.dtype) if v.dtype == torch.float32 else v for name, v in stacked.items()}
