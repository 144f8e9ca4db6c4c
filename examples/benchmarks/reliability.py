"""
Runs the whole test suite, the slow tests included, and writes down how many cases there were and what they measured.

    python examples/benchmarks/reliability.py
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

import pytest
from harness import HERE, RESULTS, write_results


class Figures:
    """Counts the cases of each file, and keeps what they record."""

    def __init__(self) -> None:
        self.cases: dict[str, Counter[str]] = {}
        self.measured: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.cases.setdefault(report.location[0], Counter())[report.outcome] += 1
            self.measured.update(dict(report.user_properties))


def parse_arguments(given: list[str]) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=str(RESULTS / "reliability.json"))
    parser.add_argument("--workers", default="2", help="processes")
    return parser.parse_args(given)


def main() -> None:
    args, figures, root = parse_arguments(sys.argv[1:]), Figures(), HERE.parent.parent
    options = ["-p", "no:cacheprovider", "-m", "", "-n", args.workers, "--rootdir", str(root), str(root / "tests")]
    code = pytest.main(options, [figures])
    if code == 0:
        cases = {file: dict(counts) for file, counts in sorted(figures.cases.items())}
        passed = sum(counts["passed"] for counts in figures.cases.values())
        write_results(args.output, passed=passed, cases=cases, measured=figures.measured)
    sys.exit(code)


if __name__ == "__main__":
    main()
