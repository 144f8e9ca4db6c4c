"""What a user's own mypy knows of the package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


SNIPPET = """
from torch import nn
from peft_luca import LucaPeftModel, Prediction, RoutingOutput, load_expert, load_experts

model: LucaPeftModel = load_experts(nn.Identity(), "folder")
found: list[Prediction] = load_expert(model, "folder").predict(["a.png"], top_k=2)
label: str = found[0].label
experts: dict[str, tuple[str, ...]] = model.experts
routed: RoutingOutput = model.route(model.scores)  # expect: arg-type
model.set_router(42)  # expect: arg-type
model.experts = 1  # expect: assignment
model.predict()  # expect: call-arg
model.get_base_model().eval()
"""


@pytest.mark.slow
def test_the_models_methods_are_known_to_mypy(tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET, encoding="utf-8")
    package = Path(__file__).parent.parent
    assert (package / "peft_luca" / "py.typed").is_file()
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path)]
    options = {"cwd": tmp_path, "env": os.environ | {"MYPYPATH": str(package), "MYPY_FORCE_COLOR": "0"}}
    said = subprocess.run(
        [*command, "snippet.py"], capture_output=True, text=True, check=False, **options
    ).stdout.splitlines()
    errors = [line for line in said if line.startswith("snippet.py") and "error:" in line]
    lines = SNIPPET.splitlines()
    expected = {i + 1: line.split("# expect: ")[1] for i, line in enumerate(lines) if "# expect: " in line}
    assert {int(line.split(":")[1]): line.rsplit("[", 1)[1].rstrip("]") for line in errors} == expected, said
