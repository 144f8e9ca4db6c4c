"""
Two people train an expert each, on classes that the other never sees. A third person puts both on one backbone. The
router chooses an expert for each image; nobody says which.

    python examples/compose.py
"""

from __future__ import annotations

from tempfile import mkdtemp

from cil import BUNDLED_BACKBONE, load_backbone
from helpers import learn, some_digits
from transformers import AutoImageProcessor, pipeline

from peft_luca import LucaPipeline, TaskStream, load_experts, save_expert


def main() -> None:
    folder = mkdtemp()
    for owner, wanted in (("ann", (0, 1)), ("ben", (2, 3))):
        trainer = learn(TaskStream.from_tasks({owner: some_digits(*wanted)}))
        save_expert(trainer.model, owner, f"{folder}/{owner}")  # or push_expert(…, "ann/digits")

    model = load_experts(load_backbone(str(BUNDLED_BACKBONE), "float32"), [f"{folder}/ann", f"{folder}/ben"])
    model.set_router("gaussian")  # both came with their statistics; "entropy" needs none
    print(model)

    images = some_digits(0, 1, 2, 3)
    names = images.features["label"].names
    processor = AutoImageProcessor.from_pretrained(BUNDLED_BACKBONE)
    options = {"image_processor": processor, "pipeline_class": LucaPipeline}
    classify = pipeline("image-classification", model=model, **options)
    answers = classify(images["image"][:], top_k=1, batch_size=32)
    right = sum(answer[0]["label"] == names[label] for answer, label in zip(answers, images["label"], strict=True))
    print(f"{right} of {len(images)} images classified right")


if __name__ == "__main__":
    main()
