"""Cases measured with the code of two revisions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.errors import ConfigurationError
from benchmark.speed import __main__ as speed
from benchmark.speed import against

#: writes the rows that the code in its folder has
SCRIPT = """
import json, os, sys
case, folder = sys.argv[1], sys.argv[3]
code = open(os.path.join(os.environ["PYTHONPATH"], "benchmark", "speed", case + ".py")).read()
rows = [dict(what=what, work="w", seconds=seconds) for what, seconds in json.loads(code).items()]
json.dump({"rows": rows}, open(os.path.join(folder, case + ".json"), "w"))
sys.exit(3 * ("fails" in code))
"""


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e")
    return subprocess.run(
        ["git", "-C", str(root), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the case ``engine``: first other rows, now these; ``vit`` came later."""
    cases = tmp_path / "checkout" / "benchmark" / "speed"
    cases.mkdir(parents=True)
    root = tmp_path / "checkout"
    git(root, "init", "-q")
    (cases / "engine.py").write_text('{"round": 4.0, "gone": 1.0}')
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    (cases / "engine.py").write_text('{"round": 1.0, "new": 2.0}')
    (cases / "vit.py").write_text("{}")
    (tmp_path / "case.py").write_text(SCRIPT)
    monkeypatch.setattr(speed, "COMMAND", (sys.executable, str(tmp_path / "case.py")))
    return root


def compare(root: Path, out: Path, *cases: str, revision: str = "HEAD") -> str:
    return against.compare(cases, revision, out, lambda *given: speed.run_case(*given[:2], None, given[2]), root)


def test_rows_of_both_codes_are_joined(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(checkout, tmp_path / "out", "engine") == ""
    record = json.loads((tmp_path / "out" / "against.json").read_text())
    assert record["against"] == git(checkout, "rev-parse", "HEAD")
    assert "revision" in record["git"]
    rows = {row["what"]: (row["before"], row["now"], row["ratio"]) for row in record["rows"]}
    assert rows == {"round": (4.0, 1.0, 0.25), "new": (None, 2.0, None), "gone": (1.0, None, None)}
    table = (tmp_path / "out" / "against.md").read_text()
    for text in (table, capsys.readouterr().out):
        assert all(part in text for part in ("0.250", "only now", "only before"))
    assert len(git(checkout, "worktree", "list").splitlines()) == 1


def test_the_older_code_is_taken_away_after_a_failure(checkout: Path, tmp_path: Path) -> None:
    (checkout / "benchmark" / "speed" / "engine.py").write_text('{"fails": 1.0}')
    assert compare(checkout, tmp_path / "out", "engine") == "engine, now: ended with status 3"
    assert not (tmp_path / "out").exists()

    def interrupted(case: str, out: Path, code: Path) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        against.compare(["engine"], "HEAD", tmp_path / "out", interrupted, checkout)
    assert len(git(checkout, "worktree", "list").splitlines()) == 1


def test_what_cannot_be_compared_is_said(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for root, cases, revision, said in (
        (checkout, ["vit"], "HEAD", "the code of HEAD has no case 'vit'"),
        (checkout, ["engine"], "nowhere", "git knows no revision 'nowhere'"),
        (tmp_path, ["engine"], "HEAD", "is none; clone the repository"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            compare(root, tmp_path / "out", *cases, revision=revision)
    with pytest.raises(SystemExit) as ended:
        speed.main(["engine", "--against", "nowhere"])
    assert ended.value.code == 2
    assert "git knows no revision 'nowhere'" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="there is no such command"):
        compare(checkout, tmp_path / "out", "engine")
