from typing import Any

import pytest
from trained_runs import Runs, trained


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs by method and options, each trained once."""
    made: dict[tuple[str, ...], Any] = {}

    def run(conf: str, *options: str) -> Any:
        if (conf, *options) not in made:
            made[conf, *options] = trained(tmp_path_factory.mktemp(conf) / "run", conf, *options)
        return made[conf, *options]

    return run
