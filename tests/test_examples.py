"""The small examples, each run as a script, and the tutorial's notebook."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", EXAMPLES / "tutorial.ipynb"
SAYS = {
    "compose": r"\b3[56]\d of 360 images classified right",
    "unlearn": r"router entropy: the same to the last bit: True\nrouter gaussian: the same to the last bit: True",
    "domains": r"accuracy over all domains (0\.9[5-9]\d|1\.000)\nwith the domain known (0\.9[5-9]\d|1\.000)",
    "image_folder": r"accuracy (0\.9[5-9]\d|1\.000) over 0, 2, 3, 1",
    "one_adapter": r"accuracy (0\.9\d\d) over 10 classes, and \1 after loading it again",
}


@pytest.fixture(autouse=True)
def _as_a_script(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "helpers", raising=False)  # that of the tests
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize("name", SAYS)
def test_an_example_prints_what_it_shows(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(SAYS[name], said), said


def test_the_index_has_every_example():
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"), *EXAMPLES.glob("space/*.py")]:
        assert f"({path.relative_to(EXAMPLES).as_posix()})" in index, path.name
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {"cil", "helpers", "onnx_predict", *SAYS}  # onnx_predict runs in tests/test_inference.py


# ---- the notebook -------------------------------------------------------------------------------------------------


def notebook_of_the_page():
    """The notebook that the tutorial page makes."""
    text = PAGE.read_text(encoding="utf-8").replace("](../examples/", "](")
    text = re.sub(r"\]\((\w+\.md)", r"](../docs/\1", text)
    text = re.sub(r" The same tutorial is a notebook:\n.*?\n", "\n", text)
    parts = re.split(r"^```python\n(.*?)^```\n", text, flags=re.M | re.S)
    cells = [
        ("code" if i % 2 else "markdown", part.strip().replace('"examples/assets/', '"assets/'))
        for i, part in enumerate(parts)
        if part.strip()
    ]
    return {
        "cells": [
            {
                "cell_type": kind,
                "id": f"cell-{i}",
                "metadata": {},
                "source": source.splitlines(keepends=True),
                **({"execution_count": None, "outputs": []} if kind == "code" else {}),
            }
            for i, (kind, source) in enumerate(cells)
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def test_the_notebook_is_the_page():
    assert json.loads(NOTEBOOK.read_text(encoding="utf-8")) == notebook_of_the_page(), (
        "make it again: python tests/test_examples.py"
    )


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: the extra test")
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel: the extra test")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel: the extra test")
    (tmp_path / "assets").symlink_to(EXAMPLES / "assets")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "TaskStream: 4 tasks, 8 classes" in said
    assert re.search(r"(0\.9\d\d|1\.000) routed", said)
    assert "late: 2 classes (eight, nine)" in said


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(notebook_of_the_page(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
