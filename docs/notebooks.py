"""The notebooks of `examples/`, run in kernels of their own, and what they print beside what stands in them.

`python docs/notebooks.py` writes into each notebook what its cells print now.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def run(path: Path) -> Any:
    """Return a notebook as it is after its cells have run in a folder of their own; raises where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=300, record_timing=False, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # libraries log their own warnings, which name folders and times
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    return notebook


def differences(path: Path) -> list[str]:
    """Return a sentence for each cell that prints something else than the notebook says."""
    pairs = zip(nbformat.read(path, as_version=4).cells, run(path).cells)
    return [
        f"{path.name}, cell {number}: printed\n{_printed(now)}\nbut the notebook says\n{_printed(said)}"
        for number, (said, now) in enumerate(pairs)
        if said.cell_type == "code" and _printed(said) != _printed(now)
    ]


def _printed(cell: Any) -> str:
    """Return the outputs of a cell as text."""
    parts = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.outputs]
    return "".join(parts)


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        nbformat.write(run(notebook_path), notebook_path)
