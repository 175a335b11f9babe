"""Notebooks run from the first cell to the last, and print what stands in them."""

import nbformat
import notebooks
import pytest


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_the_notebook_prints_what_the_notebook_says(path):
    assert notebooks.differences(path) == []


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_outputs_without_errors_and_without_times(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]

    assert cells
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells)
    assert {output.output_type for cell in cells for output in cell.outputs} == {"stream"}
    assert {output.name for cell in cells for output in cell.outputs} == {"stdout"}
    assert not any("execution" in cell.metadata for cell in cells)


def test_a_cell_that_prints_something_else_is_found(tmp_path):
    cell = nbformat.v4.new_code_cell("print(1 + 1)", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", text="3\n")]
    path = tmp_path / "wrong.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)

    assert notebooks.differences(path) == ["wrong.ipynb, cell 0: printed\n2\n\nbut the notebook says\n3\n"]
