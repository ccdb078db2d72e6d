"""Cells for runners that are processes of their own; importing them takes no time, as federation's and torch's does."""

from pathlib import Path

from benchmark.cells.identity import Cell, content_hash

CONF = Path(__file__).parent / "conf"


def cells(rounds: int, folder: Path) -> list[Cell]:
    """One run of the user's own method, of a folder, and one of this project's."""
    made = []
    for name, config in {"FedVPT": f"{folder}/own.yaml", "PFedPG": f"{CONF}/PFedPG.yaml"}.items():
        configs, overrides = (f"{CONF}/base.yaml", config), (f"--trainer.max_epochs={rounds}",)
        made.append(Cell(f"{name}-s0-{content_hash(configs, overrides)}", configs, overrides, 0))
    return made
