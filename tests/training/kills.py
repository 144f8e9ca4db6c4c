"""
Kills a small run again and again, at moments drawn at random, and says whether it always ends the same.

    python tests/training/kills.py FOLDER KILLS SEED [--processes 2]

Every run is a process forked off this one, or several, so that a life costs no imports. Half of the moments are drawn
over the whole life, the others within one of the phases of its first process, since some of these are short. Of
several processes one is killed, or all at once. What then becomes of the others is up to them in half of the cases,
for a while; else they are ended at once, as by `accelerate launch`.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from helpers import NAMES, make_splits, make_stream, make_trainer, read_json, trunk_tensors
from hub_server import HubServer, client_settings
from huggingface_hub.utils import disable_progress_bars
from torch.distributed import TCPStore

from peft_luca import ContinualTrainer, ExpertTrainer
from peft_luca.data import feature_cache
from peft_luca.training import evaluation, run_folder


PHASES = ("begin", "extraction", "training", "saving", "evaluation", "deleting", "drawing", "pushing")
REPO = "owner/run"
PATIENCE = 10.0  # seconds that a process may go on after another of its run was killed


def marking(function, phase, shared):
    """The function, saying in shared memory that its phase has begun, and afterwards that the one before goes on."""

    def marked(*args, **kwargs):
        before, shared.value = shared.value, PHASES.index(phase)
        try:
            return function(*args, **kwargs)
        finally:
            shared.value = before

    return marked


def live(folder, hub_url, shared, launched):
    """
    One life, from its beginning or from where an earlier life has left it, to its end: a stream of three tasks, one
    more, an expert deleted, the pictures drawn, and all pushed to a Hub.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(launched)
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
    settings["per_device_train_batch_size"] = 8 // int(launched.get("WORLD_SIZE", 1))
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


def begin(folder, hub, processes):
    """The processes of a life, the phase of the first, and the store in which they meet."""
    phases = [multiprocessing.RawValue("i", 0) for _ in range(processes)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if processes > 1 else None
    life = []
    for rank in range(processes):
        launched = {}
        if store is not None:  # what torchrun sets, the base of `accelerate launch`
            launched = {"MASTER_ADDR": store.host, "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
            launched |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        arguments = (folder, hub.url, phases[rank], {name: str(value) for name, value in launched.items()})
        life.append(multiprocessing.get_context("fork").Process(target=live, args=arguments))
        life[-1].start()
    return life, phases[0], store


def end(life, patience):
    """Waits until a life is over. Once one has failed the others may go on so long; counts those that did."""
    while (alive := [process for process in life if process.is_alive()]) and not any(p.exitcode for p in life):
        wait(process.sentinel for process in alive)
    until, stopped = time.monotonic() + patience, 0
    for process in alive:
        process.join(max(0.0, until - time.monotonic()))
        stopped += process.is_alive()
        process.terminate()
        process.join()
    return stopped


def main(folder, kills, seed, processes):
    plt.close(plt.figure())  # imported once, and not by every life
    with HubServer() as hub:
        return kill_again_and_again(folder, kills, seed, processes, hub)


def kill_again_and_again(folder, kills, seed, processes, hub):
    rng = random.Random(seed)
    started = time.monotonic()
    life, *_ = begin(folder / "whole", hub, processes)
    end(life, PATIENCE)
    assert not any(process.exitcode for process in life)
    seconds, whole = time.monotonic() - started, ending(folder / "whole", hub.repos.pop(REPO).files)
    killed, runs, differing, failed = dict.fromkeys(PHASES, 0), 0, 0, 0
    hit, others = {"the first": 0, "another": 0, "all": 0}, {"ended": 0, "stopped at once": 0, "stopped later": 0}
    while sum(killed.values()) < kills or (folder / "run").exists():
        life, shared, store = begin(folder / "run", hub, processes)
        patience = PATIENCE
        if sum(killed.values()) < kills:
            first = life[0]
            if rng.random() < 0.5:
                first.join(rng.uniform(0, seconds))
            else:
                phase = 1 + sum(killed.values()) % (len(PHASES) - 1)
                while first.is_alive() and shared.value != phase:
                    time.sleep(0.0005)
                first.join(rng.choice([0.0, rng.uniform(0, 0.01)]))
            phase = PHASES[shared.value]
            for process in rng.choice([life, *([process] for process in life)]):
                process.kill()
            patience = rng.choice([rng.uniform(0, 0.2), PATIENCE])
        stopped = end(life, patience)
        del store  # which the processes needed until now
        codes = [process.exitcode for process in life]
        if -signal.SIGKILL in codes:
            dead = codes.count(-signal.SIGKILL)
            killed[phase] += 1
            hit["all" if dead == processes else "the first" if codes[0] == -signal.SIGKILL else "another"] += 1
            others["stopped later" if patience == PATIENCE else "stopped at once"] += stopped
            others["ended"] += processes - dead - stopped
            continue
        runs, failed = runs + 1, failed + any(codes)
        differing += any(codes) or ending(folder / "run", hub.repos.pop(REPO).files) != whole
        shutil.rmtree(folder / "run")
    report = {"killed": killed, "runs": runs, "differing": differing, "failed": failed, "seconds": round(seconds, 2)}
    return report | ({"processes": hit, "others": others} if processes > 1 else {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kills", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--processes", type=int, default=1)
    sys.stderr.write(json.dumps(main(**vars(parser.parse_args()))))
