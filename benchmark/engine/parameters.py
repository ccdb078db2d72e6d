"""A module's parameters by name, without the walk through its submodules that torch takes at each look."""

from torch import nn


class Parameters:
    """Finds the parameters that stand in a module now, whichever objects they are meanwhile.

    Args:
        module: which keeps the submodules and the names that it has.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = {
            f"{prefix}.{name}".lstrip("."): (part._parameters, name)
            for prefix, part in module.named_modules()
            for name, value in part._parameters.items()
            if value is not None
        }

    def __getitem__(self, name: str) -> nn.Parameter:
        held, own = self._places[name]
        parameter = held[own]
        assert parameter is not None
        return parameter

    @property
    def first(self) -> nn.Parameter:
        """The first of them: what device and type of numbers the module has."""
        return self[next(iter(self._places))]
