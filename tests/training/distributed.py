"""
One run of a small stream, in as many processes as the launcher starts: what [`test_distributed`] compares.

    torchrun --nproc_per_node 2 tests/training/distributed.py FOLDER BATCH_SIZE DTYPE [NAME=VALUE ...]
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from helpers import NAMES, ForwardCount, make_splits, make_stream, make_trainer, make_vit

from peft_luca import TaskStream
from peft_luca.data.feature_cache import PartialFeatures
from peft_luca.hub import saving


@contextmanager
def watched(written):
    """Notes the name of every manifest and feature file that is written."""
    write, finish = saving.write_json, PartialFeatures.finish
    saving.write_json = lambda path, content: (written.append(path.name), write(path, content))
    PartialFeatures.finish = lambda partial: (written.append(partial.path.name), finish(partial))
    try:
        yield
    finally:
        saving.write_json, PartialFeatures.finish = write, finish


def main(folder, batch_size, dtype, *settings):
    model, written = make_vit().to(getattr(torch, dtype)), []
    count = ForwardCount(model)
    given = {name: json.loads(value) for name, value in (setting.split("=") for setting in settings)}
    # 17 and 9 images: the last batches are short, and of one image.
    uneven = [make_splits(NAMES[:1], 17, 3), make_splits(NAMES[1:4], 3, 2)] if given.pop("uneven", False) else None
    trainer = make_trainer(
        folder, TaskStream.from_tasks(uneven) if uneven else make_stream(), model,
        per_device_train_batch_size=int(batch_size), per_device_eval_batch_size=4,
        features_cache_dir=str(folder / "features"), **given,
    )  # fmt: skip
    with watched(written):
        trainer.train()
    metrics = trainer.evaluate()
    images = count.images
    pixels = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    with torch.no_grad():
        logits = trainer.model(pixels).logits
    rank = trainer.args.process_index
    said = {"images": images, "written": written, "accuracy": metrics["eval_accuracy_matrix"]}
    (folder / f"{rank}.json").write_text(json.dumps(said))
    state = {key: value for key, value in trainer.model.state_dict().items() if "luca_" in key}
    torch.save({"logits": logits, "state": state}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
