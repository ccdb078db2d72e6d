"""Settings of all tests: one thread (the tests' tensors are tiny), and quiet libraries."""

import gc

gc.disable()  # nothing that an import makes is garbage; looking for it takes a fifth of the imports' time
import logging  # noqa: E402
import os  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
# Commands keep freed memory with their process, which would grow by every test that calls one here.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**27))
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Contract tests of one method share a reference run: one worker does them all."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and item.path.name == "test_contract.py" and "conf" in parameters.params:
            item.add_marker(pytest.mark.xdist_group(parameters.params["conf"]))


def pytest_collection_finish() -> None:
    """Search for garbage among what tests make alone: the libraries' half a million objects cost 0.4 s a search."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let the libraries end as they are used to."""
    gc.unfreeze()
