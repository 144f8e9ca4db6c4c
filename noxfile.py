"""
The test suite on every Python (`nox -s pythons`), and on the lowest and the highest versions of what peft_luca depends
on (`nox -s lowest highest`). What comes behind `--` goes to pytest: `nox -s lowest -- -n 2`.

A lower bound in pyproject.toml may be moved only together with a green run of `lowest`. `highest` takes the newest of
everything, and so a torch for CUDA. Where a CPU build is wanted, pip's own variable holds it back:
`PIP_CONSTRAINT=held.txt nox -s highest`, with `torch==2.13.0` in held.txt.

PEFT's main branch and its development versions are on no package index (0.21.2 is the newest there, with no later
pre-release), so that there is no session for them: `pip install git+https://github.com/huggingface/peft` beside a
`highest` environment is the way.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nox


nox.options.sessions = ["pythons", "lowest", "highest"]
PYTHONS = ("3.11", "3.12", "3.13")
ENV = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def lower_bounds() -> list[str]:
    """`name>=version` of pyproject.toml → `name==version`."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", dependency) for dependency in project["dependencies"]]
    return [f"{match[1]}=={match[2]}" for match in found if match]


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    session.install("-c", "constraints.txt", "-e", ".[dev]")
    session.run("python", "-m", "pytest", *session.posargs, env=ENV)


@nox.session
def lowest(session: nox.Session) -> None:
    session.install("-c", "constraints.txt", "-e", ".[dev]")
    session.install("--no-deps", *lower_bounds())
    session.run("python", "-m", "pytest", *session.posargs, env=ENV)


@nox.session
def highest(session: nox.Session) -> None:
    session.install("--upgrade", "-e", ".[dev]")
    session.run("python", "-m", "pytest", *session.posargs, env=ENV)


@nox.session
def timm(session: nox.Session) -> None:
    """timm's models, without the torchvision that it asks for: the tests need nothing of it."""
    session.install("-c", "constraints.txt", "-e", ".[dev]")
    session.install("--no-deps", "timm==1.0.31")
    session.run("python", "-m", "pytest", "tests/tuner/test_architectures.py", *session.posargs, env=ENV)
