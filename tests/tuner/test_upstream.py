"""PEFT's own tests, from the sdist of the installed version, unedited, on LuCA. See peft_suite/luca_peft_suite.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import peft
import pytest


HERE = Path(__file__).parent
FILES = ("test_custom_models.py", "test_config.py")
AT_LEAST = 300


@pytest.fixture(scope="module")
def sdist() -> Path:
    """PEFT's sources with their tests, in the user's cache: downloaded by pip once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "peft_luca"
    folder = cache / f"peft-{peft.__version__}"
    if not (folder / "tests" / FILES[0]).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "peft"]
        subprocess.run([*download, "--dest", str(cache), f"peft=={peft.__version__}"], check=True)
        with tarfile.open(cache / f"peft-{peft.__version__}.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    (folder / "tests" / "__init__.py").touch()  # its tests import their helpers as a package; the sdist leaves it out
    return folder


@pytest.mark.slow
def test_pefts_own_tests_pass_on_luca(sdist: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "luca_peft_suite", "-p", "no:cacheprovider", "-n", "2"]
    command += ["-c", os.devnull, "--rootdir", str(sdist), f"--junit-xml={report}"]
    path = os.pathsep.join([str(HERE / "peft_suite"), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [*command, *(f"tests/{name}" for name in FILES)],
        cwd=sdist,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    passed = [case for case in cases if not list(case)]
    assert not bad, process.stdout[-8000:]
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
    assert len(passed) >= AT_LEAST


def test_every_exclusion_has_a_reason() -> None:
    sys.path.insert(0, str(HERE / "peft_suite"))
    try:
        import luca_peft_suite
    finally:
        sys.path.remove(str(HERE / "peft_suite"))
    for pattern, reason in luca_peft_suite.EXCLUSIONS.items():
        re.compile(pattern)
        assert len(reason.split()) >= 4
