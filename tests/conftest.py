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


#: Files whose tests of one configuration share a run that is made once in a process.
SHARE_BY_CONFIGURATION = ("test_contract.py", "test_ranks.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one worker do what shares a run: else each of them would make it."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        conf = parameters.params.get("conf") if parameters is not None else None
        if item.path.name in SHARE_BY_CONFIGURATION and conf is not None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {conf}"))
        elif item.get_closest_marker("xdist_group") is None and _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether a fixture of the test is made once for its module."""
    fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]  # pytest tells it nowhere else
    return any(made.scope == "module" for found in fixtures.values() for made in found)


def pytest_collection_finish() -> None:
    """Search for garbage among what tests make alone: the libraries' half a million objects cost 0.4 s a search."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let the libraries end as they are used to."""
    gc.unfreeze()
