"""Large tables of cases are divided among processes, by what the cells share."""

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
