"""The notebooks run from top to bottom, and every cell may be run twice."""

from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_cell_runs_twice(path):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [deepcopy(cell) for cell in notebook.cells for _ in (range(2) if cell.cell_type == "code" else ())]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{cell['id']}-{number % 2}"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert all(cell.execution_count for cell in notebook.cells)
