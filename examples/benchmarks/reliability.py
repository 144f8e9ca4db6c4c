"""
Runs the tests of what is dirty, long or parallel, the slow ones included, and writes down how many cases there were
and what was measured in them.

    python examples/benchmarks/reliability.py
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from environment import write_results


ROOT = Path(__file__).parent.parent.parent
TESTS = "images labels sources streams bases faults resume load metrics config hub_security".split()


class Figures:
    """Counts the cases of each file, and keeps what they record."""

    def __init__(self) -> None:
        self.cases: dict[str, Counter[str]] = {}
        self.measured: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.cases.setdefault(Path(report.location[0]).name, Counter())[report.outcome] += 1
            self.measured.update(dict(report.user_properties))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "reliability.json"))
    parser.add_argument("--workers", default="2", help="processes")
    args = parser.parse_args()
    figures = Figures()
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in TESTS]
    options = ["-p", "no:cacheprovider", "-m", "", "-n", args.workers, "--rootdir", str(ROOT)]
    code = pytest.main([*options, *files], [figures])
    if code == 0:
        cases = {file: dict(counts) for file, counts in sorted(figures.cases.items())}
        passed = sum(counts["passed"] for counts in figures.cases.values())
        write_results(args.output, passed=passed, cases=cases, measured=figures.measured)
    sys.exit(code)


if __name__ == "__main__":
    main()
