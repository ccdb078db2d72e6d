"""Refuse parts of towers that name places which no tower has."""

from typing import get_args

from torch import nn

from benchmark.backbones.parts import Norm, Projection, TowerPart
from benchmark.engine.roles import check_words


def check_parts(method: nn.Module) -> None:
    """Refuse projections and norms of a method's parts that no tower would ask for: the part would do nothing.

    Raises:
        ConfigurationError: a part names one.
    """
    for part in method.modules():
        if isinstance(part, TowerPart):
            title = type(part).__name__
            check_words(f"{title}.projections", part.projections, get_args(Projection))
            check_words(f"{title}.norms", part.norms, get_args(Norm))
