"""Settings of all tests and their processes: one thread (their tensors are tiny), and quiet libraries."""

import gc

gc.disable()  # nothing that an import makes is garbage; looking for it takes a fifth of the imports' time
import logging  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from functools import lru_cache  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

# Threads of processes that share a core wait for each other, many times as long as these operations take.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning.pytorch.trainer.connectors.callback_connector as connector  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from absl import logging as absl_logging  # noqa: E402

from benchmark.metrics import METRICS  # noqa: E402

torch.set_num_threads(1)
# Commands keep freed memory with their process, which would grow by every test that calls one here.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**27))
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
# Its handler, which comes with dp-accounting, writes where pytest captures; submitit closes that when it is imported.
absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__


def _know_the_file(file: Any) -> None:
    """Refuse what ``os.fsync`` refuses, and do not wait for the disk: nothing here is to outlive a power cut."""
    os.fstat(file if isinstance(file, int) else file.fileno())


os.fsync = _know_the_file

#: Files whose tests of one configuration share a run that is made once in a process.
BY_CONFIGURATION = ("test_contract.py", "test_ranks.py")
#: Files of long tests that share nothing.
TEST_BY_TEST = ("test_forks.py", "test_kill.py", "test_speed_targets.py")
#: Files that take longest, which come first: else one worker would wait for the other's last one.
FIRST = (
    "test_packaging.py",
    "test_pretended_gpu.py",
    "test_pfedpt.py",
    "test_tuning.py",
    "test_text_prompt.py",
    "test_checkpoints.py",
    "test_documentation.py",
    "test_meeting.py",
    "test_notebooks.py",
)
CONFIGURATIONS = {path.stem for path in (Path(__file__).parent / "conf").glob("*.yaml")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first."""
    order = {name: place for place, name in enumerate((*FIRST, *TEST_BY_TEST, *BY_CONFIGURATION))}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def dealt_together(nodeid: str) -> str:
    """Return the group of a test: one worker runs all tests of a group, since they share what is made once."""
    path, _, test = nodeid.partition("::")
    name = path.rpartition("/")[2]
    if name in TEST_BY_TEST:
        return nodeid
    if name in BY_CONFIGURATION:
        return " ".join([path, *CONFIGURATIONS.intersection(re.split(r"[\[\]-]", test))])
    return path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests to workers; pytest-xdist's own groups (3.8) are without effect in pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return dealt_together(nodeid)

    if config.option.dist != "loadfile":
        return None
    config.option.loadscopereorder = False  # as they are collected
    return Together(config, log)


def pytest_collection_finish() -> None:
    """Search for garbage among what tests make alone, and rarely: the libraries' objects cost 0.4 s a search."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
    # Every Trainer looks through the metadata of all that is installed, for callbacks of others.
    connector.__dict__["_load_external_callbacks"] = lru_cache(connector.__dict__["_load_external_callbacks"])


def pytest_sessionfinish() -> None:
    """Let the libraries end as they are used to: nanobind would tell of leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _own_metrics_are_forgotten() -> Iterator[None]:
    """Make a custom metric that a test has named unknown to the next one."""
    before = dict(METRICS)
    yield
    if before != METRICS:
        METRICS.clear()
        METRICS.update(before)
