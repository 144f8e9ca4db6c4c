"""What every results file says about how it was made."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import peft_luca


PACKAGES = ("torch", "peft", "transformers", "accelerate", "datasets", "numpy")


def write_results(output: str, **content: Any) -> None:
    """Write a results file: the command, versions, kind of machine, and what was measured."""
    environment = {
        "peft_luca": peft_luca.__version__,
        **{name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, CPU, {torch.get_num_threads()} threads",
    }
    command = " ".join(["python", *sys.argv])
    text = json.dumps({"command": command, "environment": environment, **content}, indent=2)
    Path(output).write_text(text + "\n", encoding="utf-8")
