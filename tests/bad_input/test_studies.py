"""Files of studies that are damaged, in use or changed: one line, before a trial, and nothing is deleted."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hand_made_study import curve, finish, opened, run

from benchmark.errors import ConfigurationError
from benchmark.tuning.study import Studies

pytest.importorskip("optuna")

NAME = "alpha-digits-s0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study of three trials and their runs."""
    folder = tmp_path_factory.mktemp("whole")
    study = opened(folder, trials=3)
    run(study)
    study.close()
    return folder


@pytest.fixture
def file(whole: Path, tmp_path: Path) -> Path:
    """A copy of the study's file, beside the same runs."""
    (tmp_path / "studies").mkdir()
    (tmp_path / "runs").symlink_to(whole / "runs")
    copied = tmp_path / "studies" / f"{NAME}.db"
    copied.write_bytes((whole / "studies" / f"{NAME}.db").read_bytes())
    return copied


def refusal(file: Path) -> str:
    """The line with which the study is refused."""
    with pytest.raises(ConfigurationError) as refused:
        opened(file.parents[1], trials=3)
    said = str(refused.value)
    assert str(file) in said
    assert "\n" not in said
    return said


def changed(statement: str) -> Callable[[Path], None]:
    """Return a function that changes a database file by a statement."""

    def change(file: Path) -> None:
        with closing(sqlite3.connect(file)) as database, database:
            assert database.execute(statement).rowcount > 0

    return change


def _zeros(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096 * 3 : 4096 * 4] = bytes(4096)
    file.write_bytes(content)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "garbage": (lambda file: file.write_bytes(b"no database" * 999), "file is not a database"),
    "truncated": (lambda file: os.truncate(file, file.stat().st_size // 2), "malformed"),
    "a page of zeros": (_zeros, "damaged"),
    "a folder": (_folder, "is a folder; expected a file of SQLite: move it away"),
    "a FIFO": (_fifo, "is no regular file; expected a file of SQLite"),
    "a link": (_device, "is a link; expected a file of SQLite"),
    "another version": (changed("UPDATE alembic_version SET version_num = 'v9.9.9.z'"), "cannot be used"),
    "the other direction": (
        changed("UPDATE study_directions SET direction = 'MINIMIZE'"),
        "is to minimize, expected to maximize the accuracy",
    ),
    "no direction": (changed("DELETE FROM study_directions"), "is to do nothing, expected to maximize"),
    "an unknown direction": (changed("UPDATE study_directions SET direction = 'UP'"), "cannot be used"),
    "facts that are none": (
        changed("UPDATE study_user_attributes SET value_json = '3' WHERE key = 'tuned'"),
        "does not say what it tunes",
    ),
    "no facts": (changed("DELETE FROM study_user_attributes WHERE key = 'tuned'"), "does not say what it tunes"),
    "no JSON": (changed("UPDATE study_user_attributes SET value_json = '{'"), "cannot be used (JSONDecodeError"),
    "images that are none": (
        changed("UPDATE study_user_attributes SET value_json = '[1]' WHERE key = 'images'"),
        "does not say of which images it is",
    ),
    "no run": (changed("DELETE FROM trial_user_attributes WHERE key = 'run'"), "trial 0 has the run None, expected"),
    "another run": (
        changed("UPDATE trial_user_attributes SET value_json = '\"../x\"' WHERE key = 'run'"),
        "trial 0 has the run ../x, expected alpha-digits-s0-",
    ),
    "no seconds": (changed("DELETE FROM trial_user_attributes WHERE key = 'seconds'"), "trial 0 has seconds None"),
    "seconds that are a text": (
        changed("UPDATE trial_user_attributes SET value_json = '\"x\"' WHERE key = 'seconds'"),
        "trial 0 has seconds x, expected a number from 0 on",
    ),
    "an attribute that is no JSON": (changed("UPDATE trial_user_attributes SET value_json = 'x'"), "cannot be used"),
    "no score": (changed("DELETE FROM trial_values"), "trial 0 has the score None, expected a number"),
    "a score of NULL": (changed("UPDATE trial_values SET value = NULL"), "cannot be used (AssertionError"),
    "a score that is infinite": (changed("UPDATE trial_values SET value_type = 'INF_POS', value = NULL"), "score inf"),
    "a score that is a text": (
        changed("UPDATE trial_values SET value = 'x'"),
        "trial 0 has the score x, expected a number",
    ),
    "another score": (
        changed("UPDATE trial_values SET value = 99 WHERE trial_id = 2"),
        "trial 1 has the score 99.0, and the record of its run ",
    ),
    "a value out of the space": (
        changed("UPDATE trial_params SET param_value = 77 WHERE param_name = 'model.lr'"),
        "trial 0 has the value 77 of model.lr, expected a position from 0 to 4",
    ),
    "another value of the space": (
        changed("UPDATE trial_params SET param_value = 4 WHERE param_name = 'model.lr' AND trial_id = 1"),
        "trial 0 has the run ",
    ),
    "no values": (changed("DELETE FROM trial_params"), "trial 0 has values of nothing, expected model.lr"),
    "an unknown state": (changed("UPDATE trials SET state = 'LOST'"), "cannot be used (LookupError"),
    "a round that is none": (
        changed("UPDATE trial_intermediate_values SET step = 500 WHERE step = 1"),
        "trial 0 has scores of round 500, expected 1 to 4",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_study_that_is_not_as_it_was_written_is_refused(case: str, file: Path) -> None:
    damage, words = DAMAGES[case]
    damage(file)
    before = file.read_bytes() if file.is_file() and not file.is_symlink() else None
    assert words in refusal(file)
    assert before is None or file.read_bytes() == before


def test_a_table_that_is_gone_is_told(file: Path) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("DROP TABLE trial_values")
    assert "trial 0 has the score None, expected a number" in refusal(file)


def test_a_study_that_another_program_has_locked_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.tuning.study_file.PATIENCE", 0.1)
    with closing(sqlite3.connect(file)) as database:
        database.execute("BEGIN EXCLUSIVE")
        assert "is locked by another program, such as a dashboard; end that, then try again" in refusal(file)
    opened(file.parents[1], trials=3).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where nobody may")
def test_a_study_that_cannot_be_written_is_told(file: Path) -> None:
    file.chmod(0o400)
    assert "readonly database" in refusal(file)


def test_a_study_that_is_locked_while_it_goes_on_ends_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmark.tuning.study_file.PATIENCE", 0.1)
    study = opened(tmp_path, trials=3)
    cell = study.next()
    with closing(sqlite3.connect(study.file)) as database:
        database.execute("BEGIN EXCLUSIVE")
        assert cell is not None
        assert Studies([study]).after(cell, finish(study.runs_dir / cell.name, curve(cell)), 1.0) == []
    assert "is locked by another program" in study.error
    study.close()


def test_a_whole_study_and_an_empty_file_are_taken(file: Path, tmp_path: Path) -> None:
    study = opened(file.parents[1], trials=3)
    assert [trial.state for trial in study.trials] == ["complete"] * 3
    study.close()
    (tmp_path / "other" / "studies").mkdir(parents=True)
    (tmp_path / "other" / "studies" / f"{NAME}.db").touch()  # a kill before anything was written
    study = opened(tmp_path / "other", trials=3)
    assert study.trials == []
    study.close()
