"""
Kills a small run again and again, at moments drawn at random, and says whether it always ends the same.

    python tests/training/kills.py FOLDER KILLS SEED

Every run is a process forked off this one, so that a life costs no imports. Half of the moments are drawn over the
whole life, the others within one of the phases, since some of these are short.
"""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from helpers import NAMES, make_splits, make_stream, make_trainer, read_json, trunk_tensors
from hub_server import HubServer, client_settings
from huggingface_hub.utils import disable_progress_bars

from peft_luca import ContinualTrainer, ExpertTrainer
from peft_luca.data import feature_cache
from peft_luca.training import evaluation, run_folder


PHASES = ("begin", "extraction", "training", "saving", "evaluation", "deleting", "drawing", "pushing")
REPO = "owner/run"


def marking(function, phase, shared):
    """The function, saying in shared memory that its phase has begun, and afterwards that the one before goes on."""

    def marked(*args, **kwargs):
        before, shared.value = shared.value, PHASES.index(phase)
        try:
            return function(*args, **kwargs)
        finally:
            shared.value = before

    return marked


def live(folder, hub_url, shared):
    """
    One life, from its beginning or from where an earlier life has left it, to its end: a stream of three tasks, one
    more, an expert deleted, the pictures drawn, and all pushed to a Hub.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    feature_cache.CHECKPOINT_SECONDS = 0.0
    evaluation.TaskFeatures._extract = marking(evaluation.TaskFeatures._extract, "extraction", shared)
    ExpertTrainer.train = marking(ExpertTrainer.train, "training", shared)
    run_folder.RunFolder.add_expert = marking(run_folder.RunFolder.add_expert, "saving", shared)
    evaluation.measure_stage = marking(evaluation.measure_stage, "evaluation", shared)
    ContinualTrainer.delete_adapter = marking(ContinualTrainer.delete_adapter, "deleting", shared)
    ContinualTrainer.save_plots = marking(ContinualTrainer.save_plots, "drawing", shared)
    ContinualTrainer.push_to_hub = marking(ContinualTrainer.push_to_hub, "pushing", shared)
    os.environ["HF_TOKEN"] = "hf_owner"
    disable_progress_bars()
    for setting in client_settings(hub_url, folder.with_name(f"{folder.name}_hub")):
        setattr(*setting)
    results, stream, late = folder / "out" / "results.json", make_stream(), make_splits(NAMES[:2], seed=9)
    is_late = results.is_file() and any(task["name"] == "late" for task in read_json(results)["tasks"])
    if is_late:
        stream.append(late, "late")
    settings = {"features_cache_dir": str(folder / "cache"), "per_device_eval_batch_size": 4, "save_strategy": "epoch"}
    run = make_trainer(folder / "out", stream, hub_model_id=REPO, **settings)
    trunk = trunk_tensors(run.model)
    run.train(resume_from_checkpoint=True)
    if not is_late:
        run.train_task(late, "late")
    if "task_1" in run.tuner.experts:
        run.delete_adapter("task_1", features=True)
    run.evaluate()
    run.save_plots()
    run.push_to_hub()
    assert all(torch.equal(value, trunk[name]) for name, value in trunk_tensors(run.model).items())


def ending(folder, pushed):
    """A digest of all that a run has left but how long it took: experts, figures, names of files, what was pushed."""
    results = read_json(folder / "out" / "results.json")
    for task in results["tasks"]:
        del task["seconds"]
    digest = hashlib.sha256(json.dumps(results).encode())
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode())
        if path.suffix in (".safetensors", ".arrow", ".jsonl") or path.name in ("experts.json", "adapter_config.json"):
            digest.update(path.read_bytes())
    for name, content in sorted(pushed.items()):
        digest.update(name.encode() + (b"" if name == "results.json" else content))
    return digest.hexdigest()


def begin(folder, hub):
    shared = multiprocessing.RawValue("i", 0)
    process = multiprocessing.get_context("fork").Process(target=live, args=(folder, hub.url, shared))
    process.start()
    return process, shared


def main(folder, kills, seed):
    plt.close(plt.figure())  # imported once, and not by every life
    with HubServer() as hub:
        return kill_again_and_again(folder, kills, seed, hub)


def kill_again_and_again(folder, kills, seed, hub):
    rng = random.Random(seed)
    started = time.monotonic()
    process, _ = begin(folder / "whole", hub)
    process.join()
    assert process.exitcode == 0
    seconds, whole = time.monotonic() - started, ending(folder / "whole", hub.repos.pop(REPO).files)
    killed, runs, differing, failed = dict.fromkeys(PHASES, 0), 0, 0, 0
    while sum(killed.values()) < kills or (folder / "run").exists():
        process, shared = begin(folder / "run", hub)
        if sum(killed.values()) < kills:
            if rng.random() < 0.5:
                process.join(rng.uniform(0, seconds))
            else:
                phase = rng.randrange(1, len(PHASES))
                while process.is_alive() and shared.value != phase:
                    time.sleep(0.0005)
                process.join(rng.uniform(0, 0.01))
            phase = PHASES[shared.value]
            process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            killed[phase] += 1
            continue
        runs, failed = runs + 1, failed + (process.exitcode != 0)
        differing += process.exitcode != 0 or ending(folder / "run", hub.repos.pop(REPO).files) != whole
        shutil.rmtree(folder / "run")
    return {"killed": killed, "runs": runs, "differing": differing, "failed": failed, "seconds": round(seconds, 2)}


if __name__ == "__main__":
    sys.stderr.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
