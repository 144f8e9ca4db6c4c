"""
Two people train an expert each, on classes that the other never sees. A third person puts both on one backbone. The
router chooses an expert for each image; nobody says which.

    python examples/compose.py
"""

from __future__ import annotations

from tempfile import mkdtemp

from cil import BUNDLED_BACKBONE
from helpers import learn, some_digits

from peft_luca import TaskStream, load_experts, save_expert
from peft_luca.cli import load_backbone


def main() -> None:
    folder = mkdtemp()
    for owner, wanted in (("ann", (0, 1)), ("ben", (2, 3))):
        trainer = learn(TaskStream.from_tasks({owner: some_digits(*wanted)}))
        save_expert(trainer.model, owner, f"{folder}/{owner}")  # or push_expert(…, "ann/digits")

    model = load_experts(load_backbone(str(BUNDLED_BACKBONE)), [f"{folder}/ann", f"{folder}/ben"])
    print(model)

    images = some_digits(0, 1, 2, 3)
    names = images.features["label"].names
    answers = model.predict(images)
    print(answers[0])
    right = sum(answer.label == names[label] for answer, label in zip(answers, images["label"], strict=True))
    print(f"{right} of {len(images)} images classified right")


if __name__ == "__main__":
    main()
