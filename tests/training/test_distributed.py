"""Two processes learn what one does, share the work, and write every file once."""

import os
import subprocess
import sys
from pathlib import Path

import distributed
import pytest
import torch
from helpers import files_in, read_json


TESTS = Path(__file__).parents[1]


def launch(folder, processes, batch_size, dtype="float32", *settings):
    """One run in so many processes, a single one in this; what each of them saw, and its experts."""
    folder.mkdir()
    arguments = [str(folder), str(batch_size), dtype, *settings]
    if processes == 1:
        distributed.main(folder, *arguments[1:])
    else:
        # `accelerate launch --cpu` starts one process whatever it is told, unless there is MPI.
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [*torchrun, distributed.__file__, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert result.returncode == 0, result.stderr[-4000:]
    said = [read_json(folder / f"{rank}.json") for rank in range(processes)]
    learned = [torch.load(folder / f"{rank}.pt") for rank in range(processes)]
    for other in learned[1:]:
        assert all(torch.equal(other["state"][key], value) for key, value in learned[0]["state"].items())
    return said, learned[0]


def compare(tmp_path, dtype, tolerance, *settings):
    (one,), alone = launch(tmp_path / "one", 1, 8, dtype, *settings)
    two, shared = launch(tmp_path / "two", 2, 4, dtype, *settings)
    for key, value in alone["state"].items():
        torch.testing.assert_close(shared["state"][key], value, rtol=0, atol=tolerance)
    torch.testing.assert_close(shared["logits"], alone["logits"], rtol=0, atol=1e-3 if dtype == "float32" else 1e-5)
    assert [said["accuracy"] for said in two] == [one["accuracy"]] * 2
    return one, two


def test_two_processes_are_one(tmp_path):
    one, two = compare(tmp_path, "float32", 1e-4)
    # The first run measures the reference, and the others find it on disk.
    assert sum(said["images"] for said in two) == one["images"] - 768 == 48 + 24
    assert min(said["images"] for said in two) > 0
    main, other = (said["written"] for said in two)
    assert not other
    assert len([name for name in main if name.endswith(".safetensors")]) == 6 == len(set(main) - {"experts.json"})
    assert files_in(tmp_path / "two" / "features") == files_in(tmp_path / "one" / "features")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("cache_features=false",)])
def test_in_double_precision_where_no_batch_divides_evenly(tmp_path, settings):
    compare(tmp_path, "float64", 1e-6, "uneven=true", *settings)


@pytest.mark.slow
def test_in_mixed_precision(tmp_path):
    (one,), alone = launch(tmp_path / "one", 1, 8, "float32", "bf16=true")
    two, shared = launch(tmp_path / "two", 2, 4, "float32", "bf16=true")
    torch.testing.assert_close(shared["logits"], alone["logits"], rtol=0.05, atol=0.3)
    assert two[0]["accuracy"] == two[1]["accuracy"]
    assert one["accuracy"][-1] == pytest.approx(two[0]["accuracy"][-1], abs=0.2)
