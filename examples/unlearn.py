"""
Forget one task, exactly: after its expert is deleted, the model answers every image, to the last bit, as one that has
never seen the task.

    python examples/unlearn.py
"""

from __future__ import annotations

import torch
from helpers import learn, some_digits

from peft_luca import TaskStream


def main() -> None:
    tasks = {"low": some_digits(0, 1), "middle": some_digits(4, 5), "high": some_digits(8, 9)}
    forgetful = learn(TaskStream.from_tasks(tasks), num_train_epochs=5)
    forgetful.delete_adapter("middle")

    tasks.pop("middle")
    innocent = learn(TaskStream.from_tasks(tasks), num_train_epochs=5)

    pixels = innocent.processing_class(
        images=[image.convert("RGB") for image in some_digits(*range(10))[:200]["image"]], return_tensors="pt"
    )["pixel_values"]
    for router in ("entropy", "gaussian"):
        answers = []
        for trainer in (forgetful, innocent):
            trainer.model.set_router(router)
            answers.append(trainer.model.route(pixels).logits)
        print(f"router {router}: the same to the last bit: {torch.equal(*answers)}")


if __name__ == "__main__":
    main()
