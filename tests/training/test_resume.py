"""A run that is interrupted anywhere goes on to the same end, to the bit; a disk that fails costs nothing."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import assert_same, expert_tensors, make_stream, make_trainer, read_json

from peft_luca import utils as cache
from peft_luca.data import feature_file


def kill(folder, kills, seed):
    """`kills.py` in a process of its own, which can fork safely."""
    command = [sys.executable, str(Path(__file__).parent / "kills.py"), str(folder), str(kills), str(seed)]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stderr.splitlines()[-1])


def test_ten_kills(tmp_path):
    report = kill(tmp_path, 10, seed=1)
    assert sum(report["killed"].values()) == 10
    assert report["runs"] >= 1
    assert (report["failed"], report["differing"]) == (0, 0), report


@pytest.mark.slow
def test_a_hundred_kills(tmp_path, record_property):
    report = kill(tmp_path, 120, seed=2)
    record_property("kills", report)
    assert sum(report["killed"].values()) == 120
    assert all(report["killed"].values()), report  # in every phase
    assert (report["failed"], report["differing"]) == (0, 0), report


def settings(tmp_path):
    return {"features_cache_dir": str(tmp_path / "features"), "num_train_epochs": 1}


def experts(trainer):
    return {name: expert_tensors(trainer.model, name) for name in trainer.tuner.experts}


@pytest.mark.parametrize("resume", [True, None])
def test_resume_from_checkpoint_is_train(tmp_path, resume):
    first = make_trainer(tmp_path / "out", **settings(tmp_path))
    first.train(resume_from_checkpoint=resume)  # nothing to go on from yet
    again = make_trainer(tmp_path / "out", **settings(tmp_path))
    assert again.train(resume_from_checkpoint=resume).global_step == 0
    for name, tensors in experts(first).items():
        assert_same(expert_tensors(again.model, name), tensors)


def test_half_written_files_of_a_killed_run_are_cleared_away(tmp_path):
    out = tmp_path / "out"
    (out / ".task_1.abcd1234" / "task_1").mkdir(parents=True)
    (out / ".results.json.x_y12345").write_text("{")
    (out / ".keep").write_text("not ours")
    make_trainer(out, **settings(tmp_path)).train()
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == [".keep"]


def test_no_room_at_any_write(tmp_path, monkeypatch):
    """Every write to the disk fails once, as it does when the disk is full."""
    monkeypatch.setattr(feature_file, "CHECKPOINT_SECONDS", 0.0)
    whole = make_trainer(tmp_path / "whole", make_stream(increment=3), **settings(tmp_path / "of_whole"))
    whole.train()
    real, calls = os.fsync, 0

    def full(handle):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    failing, failures = 0, []
    while True:
        calls, failing = 0, failing + 1
        trainer = make_trainer(tmp_path / "out", make_stream(increment=3), **settings(tmp_path))
        try:
            trainer.train()
        except OSError as error:
            failures.append((error.errno, str(error)))
        else:
            break
    assert len(failures) > 5
    assert all(number == errno.ENOSPC and "cannot write" in message for number, message in failures)
    for name, tensors in experts(whole).items():
        assert_same(expert_tensors(trainer.model, name), tensors)
    assert read_json(tmp_path / "out" / "results.json")["accuracy_matrix"] == whole.results()["accuracy_matrix"]


@pytest.fixture
def disk(tmp_path):
    """A folder that can be made a disk of a given size, or read-only, where this user may mount."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        return folder

    yield mount
    while os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("full", ["features", "out"])
def test_a_full_disk(tmp_path, disk, full):
    folder = disk("size=256k")
    places = {"features": tmp_path / "features", "out": tmp_path / "out"} | {full: folder / full}
    (folder / full).mkdir()
    arguments = {"features_cache_dir": str(places["features"]), "num_train_epochs": 1}
    trainer = make_trainer(places["out"], **arguments)
    trainer.train_task(trainer.stream[0])
    before = experts(trainer)
    filler = folder / "filler"
    filler.write_bytes(b"0" * (shutil.disk_usage(folder).free - 4096))
    with pytest.raises(OSError, match=r"cannot write .*No space left on device.* What was finished before is kept"):
        trainer.train()
    assert_same(expert_tensors(trainer.model, "task_0"), before["task_0"])
    assert list(trainer.tuner.experts) == ["task_0"]
    filler.unlink()
    trainer.train()
    assert list(trainer.tuner.experts) == ["task_0", "task_1", "task_2"]
    again = make_trainer(places["out"], **arguments)
    assert again.train().global_step == 0


@pytest.mark.parametrize("closed", ["features", "out"])
def test_a_read_only_folder(tmp_path, disk, closed):
    folder = disk("size=4m")
    places = {"features": tmp_path / "features", "out": tmp_path / "out"} | {closed: folder / closed}
    (folder / closed).mkdir()
    arguments = {"features_cache_dir": str(places["features"]), "num_train_epochs": 1}
    trainer = make_trainer(places["out"], **arguments)
    trainer.train_task(trainer.stream[0])
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with pytest.raises(OSError, match=r"cannot write .*Read-only file system.* make the folder writable"):
        make_trainer(places["out"], **arguments).train()
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    again = make_trainer(places["out"], **arguments)
    again.train()
    for name, tensors in experts(trainer).items():
        assert_same(expert_tensors(again.model, name), tensors)
