"""Personalized federated prompt learning on images: contract, engine, and what runs and reads them."""

from typing import TYPE_CHECKING, Any

from benchmark.shipped import version

if TYPE_CHECKING:  # slow to import
    from benchmark.predict.trained_run import TrainedRun as TrainedRun
    from benchmark.run.fit import FinishedRun as FinishedRun
    from benchmark.run.fit import fit as fit

    __version__: str

__all__ = ["FinishedRun", "TrainedRun", "__version__", "fit"]


if not TYPE_CHECKING:  # or type checkers would take any name for one of this module

    def __getattr__(name: str) -> Any:
        """Import what is offered when it is asked for: ``import benchmark`` loads neither torch nor Lightning."""
        if name == "__version__":
            return version()
        if name in ("FinishedRun", "fit"):
            from benchmark.run import fit as module

            return getattr(module, name)
        if name == "TrainedRun":
            from benchmark.predict.trained_run import TrainedRun

            return TrainedRun
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
