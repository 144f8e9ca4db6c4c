"""The small examples, each run as a script, and the tutorial's notebook."""

import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
from hub_server import HubServer


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


def executed(folder, environment):
    """The page's notebook as it runs in an empty folder, with a Hub on the loopback interface."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: the extra test")
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel: the extra test")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel: the extra test")
    (folder / "assets").symlink_to(EXAMPLES / "assets")
    text = json.dumps(notebook_of_the_page()).replace("me/digits", "owner/digits")  # who is logged in there
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    with HubServer() as server:
        variables = {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_owner", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
        variables |= {"HF_HOME": str(folder / "home"), "IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": str(ROOT)}
        variables |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
        for name, value in variables.items():
            environment(name, value)
        client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
        client.execute()
        pushed = sorted(server.repos)
    return notebook, pushed


def said_by(notebook):
    """What each code cell prints; progress bars and warnings are left out."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    texts = ["".join("".join(o["text"]) for o in c["outputs"] if o.get("name") == "stdout") for c in cells]
    return [re.sub(r"(?<=, )\d+\.\d s\b|\d+(\.\d+)?s\b", "…", text) for text in texts]


def test_the_notebook_is_the_page_and_has_ten_cells_of_code():
    kept = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in kept["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    assert kept == notebook_of_the_page(), "make it again: python tests/test_examples.py"
    assert sum(cell["cell_type"] == "code" for cell in kept["cells"]) == 10


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch, tmp_path):
    notebook, pushed = executed(tmp_path, monkeypatch.setenv)
    said = "".join(said_by(notebook))
    assert "TaskStream: 4 tasks, 8 classes" in said
    assert re.search(r"(0\.9\d\d|1\.000) routed", said)
    assert "late: 2 classes (eight, nine)" in said
    assert "owner/digits" in pushed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        outputs = said_by(executed(Path(name), os.environ.__setitem__)[0])
    written = notebook_of_the_page()
    for cell, text in zip((cell for cell in written["cells"] if cell["cell_type"] == "code"), outputs, strict=True):
        if text:
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}]
    NOTEBOOK.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
