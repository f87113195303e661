"""Large tables of cases are divided among processes, by what the cells share."""

import datetime
import itertools
import subprocess

from support import scheduling


def test_a_file_is_whole_unless_it_is_large_and_the_cells_of_a_program_stay_together():
    file = "tests/trainer/test_keras_surface.py"
    programs = [f"{file}::test_agrees[loss {n}" for n in range(60)]
    cells = [f"{program}@{rows}-mirrored 2]" for program in programs for rows in (61, 72)]
    few, many = scheduling.parts(cells), scheduling.parts([*cells, f"{file}::test_names"])
    assert {few(cell) for cell in cells} == {file}
    assert len({many(cell) for cell in cells}) == scheduling.PARTS
    assert all(len({many(cell) for cell in cells if cell.startswith(f"{program}@")}) == 1 for program in programs)
    assert scheduling.parts([f"tests/data/test_sources.py::test[{n}]" for n in range(500)])(
        "tests/data/test_sources.py::test[0]"
    ) == ("tests/data/test_sources.py")


def test_the_parts_of_a_run_hold_each_test_once_and_are_about_equal():
    tests = [f"tests/data/test_{file}.py::test[{n}]" for file in range(20) for n in range(file)]
    chosen = [scheduling.select(tests, number, 3) for number in (1, 2, 3)]
    assert sorted(itertools.chain(*chosen)) == sorted(tests)
    assert max(map(len, chosen)) - min(map(len, chosen)) <= 20
    files = [{test.partition("::")[0] for test in part} for part in chosen]
    assert not files[0] & files[1] and not files[1] & files[2] and not files[0] & files[2]


def test_a_record_names_commit_part_and_outcome(tmp_path):
    git = lambda *words: subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True, text=True)
    git("init", "-q")
    (tmp_path / ".gitignore").write_text(".test-parts\n")
    git("add", ".gitignore")
    git("-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "first")
    commit = git("rev-parse", "HEAD").stdout.strip()
    scheduling.record(tmp_path, "2/6", True, datetime.datetime(2026, 1, 2, 3, 4))
    (tmp_path / "more").touch()
    scheduling.record(tmp_path, "1/6", False, datetime.datetime(2026, 1, 2, 3, 5))
    assert (tmp_path / ".test-parts").read_text().splitlines() == [
        f"{commit} part 2/6 passed 2026-01-02 03:04",
        f"{commit}+changes part 1/6 failed 2026-01-02 03:05",
    ]
