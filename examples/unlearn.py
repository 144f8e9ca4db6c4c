"""
Forget one task exactly: after its expert is deleted, the model gives every image the same logits, to the last bit, as
a model that never learned the task.

    python examples/unlearn.py
"""

from __future__ import annotations

import torch
from helpers import learn, some_digits

from peft_luca import TaskStream, pixel_values


def main() -> None:
    tasks = {"low": some_digits(0, 1), "middle": some_digits(4, 5), "high": some_digits(8, 9)}
    trainer = learn(TaskStream.from_tasks(tasks), num_train_epochs=5)
    trainer.delete_adapter("middle")

    tasks.pop("middle")
    never = learn(TaskStream.from_tasks(tasks), num_train_epochs=5)

    pixels = pixel_values(never.model, some_digits(*range(10))[:100]["image"], never.processing_class)
    for router in ("entropy", "gaussian"):
        logits = []
        for model in (trainer.model, never.model):
            model.set_router(router)
            logits.append(model.route(pixels).logits)
        print(f"router {router}: the same to the last bit: {torch.equal(*logits)}")


if __name__ == "__main__":
    main()
