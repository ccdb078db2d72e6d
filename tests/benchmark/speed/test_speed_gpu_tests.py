"""The tests that need a GPU as rows of the table of all cases."""

import pytest

from benchmark.errors import ConfigurationError
from benchmark.speed import gpu_tests
from benchmark.speed.__main__ import CASES, NAMED_ONLY, main
from benchmark.speed.measure import device

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase name="test_a_step_waits[FedAvg]" time="1.5"/>
<testcase name="test_a_step_waits[TPFL]" time="0.5"><failure message="it waited"/></testcase>
<testcase name="test_a_step_waits[FedVPT]" time="0"><skipped/></testcase>
<testcase name="test_a_record" time="2.0"/>
</testsuite></testsuites>"""


def test_a_row_sums_the_cases_of_a_test_and_names_what_failed() -> None:
    first, second = gpu_tests.rows_of(REPORT)
    assert (first.what, first.work, first.seconds) == ("a step waits", "3 cases", 2.0)
    assert first.note == "1 passed, 1 failed, 1 skipped: test_a_step_waits[TPFL]"
    assert (second.what, second.seconds, second.note) == ("a record", 2.0, "1 passed, 0 failed, 0 skipped")


@pytest.mark.skipif(device() == "cuda", reason="there is a GPU")
def test_without_a_gpu_its_tests_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="needs a GPU, and torch sees none here"):
        gpu_tests.run(gpu_tests.TESTS)
    with pytest.raises(SystemExit) as ended:
        main(["gpu_tests"])
    assert ended.value.code == 2
    assert "error: the case gpu_tests needs a GPU" in capsys.readouterr().err.splitlines()[-1]


def test_cases_that_run_only_when_named_are_cases() -> None:
    assert set(NAMED_ONLY) < set(CASES)
