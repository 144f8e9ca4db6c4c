"""
A demonstration in the browser: teach a frozen model a new class from ten pictures, ask it, and let it forget the class
again. It needs no network.

    python examples/space/app.py
"""

from __future__ import annotations

import os
import random
import time
from itertools import count
from pathlib import Path
from string import ascii_uppercase
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from transformers import AutoImageProcessor, AutoModelForImageClassification

from peft_luca import (
    ContinualTrainer,
    ContinualTrainingArguments,
    TaskStream,
    load_experts,
    pixel_values,
    save_experts,
)


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
import gradio as gr


HERE = Path(__file__).parent
BACKBONE = next(p for p in (HERE / "letters-vit", HERE.parent / "assets" / "letters-vit") if p.is_dir())
FOLDER = Path(mkdtemp())
PAIRS = {"zero_one": "01", "two_three": "23", "four_five": "45"}  # what every visitor's model knows from the start

INTRODUCTION = """
# Teach a frozen model a new class from ten pictures

This small vision transformer was pretrained on letters and stays frozen. What it learns goes into small **experts**
beside it: here three, for the handwritten digits 0 to 5. Add one of your own. It takes seconds, needs no earlier
picture, and leaves the other experts as they are.
"""
HOW_TO = """
Drop about ten pictures, or have ten drawn of a letter that it does not know, such as the A below. Pictures are shrunk
to 32x32 pixels, so that simple shapes do best. Only you see what you teach.
"""
MEANING = """
- **Certain**: how likely the answer is right, if the image is of a class that it was taught. Of {count} digits kept
  back from training, `auto` gets {right} right and is {certain} certain on average.
- **Known**: how usual the image is. 30% means that 30% of the training pictures were at least as unusual for their
  class. Below 5% the answer is “unknown”: so it is for {unknown} of the digits kept back.
- **Expert**: who answers. With `entropy` each expert scores all classes, so that one may answer with another's class.
"""
# Small pictures are shown as the pixels that the model gets, not as a blur.
CSS = """
#image img { width: 100%; height: 100%; object-fit: contain; }
#image img, #examples img { image-rendering: pixelated; }
#examples .container, #examples img { width: 48px; height: 48px; object-fit: contain; }
#answer th, #answer td { word-break: normal; overflow-wrap: normal; }
#gallery, #gallery .grid-wrap { min-height: 220px; }
#gallery .grid-container { grid-template-columns: repeat(5, minmax(0, 1fr)); }
#gallery:has(img) [data-testid="block-label"] { display: none; }
"""


def learn(model: Any, tasks: dict[str, dict[str, list[Any]]]) -> Any:
    """Trains an expert for each task. A task has the images, or their paths, of each of its classes."""
    datasets = {}
    for task, classes in tasks.items():
        images = [image for of_class in classes.values() for image in of_class]
        labels = [name for name, of_class in classes.items() for _ in of_class]
        rows = Dataset.from_dict({"image": images, "label": labels})
        datasets[task] = rows.cast_column("image", ImageFeature())  # also of paths
    with TemporaryDirectory() as out:
        trainer = ContinualTrainer(
            model=model,
            args=ContinualTrainingArguments(out, logging_strategy="no", disable_tqdm=True),
            stream=TaskStream.from_tasks(datasets),
            processing_class=AutoImageProcessor.from_pretrained(BACKBONE),
        )
        trainer.train()
    return trainer.model


def new_model() -> Any:
    """A visitor's own model: what one visitor teaches does not touch the others."""
    vit = AutoModelForImageClassification.from_pretrained(BACKBONE, num_labels=0)
    return load_experts(vit, FOLDER / "experts")


def draw_letter(letter: str, seed: int) -> Image.Image:
    """A letter in white on black, a little turned and out of place, so that no two are alike."""
    rng = random.Random(f"{letter} {seed}")
    image = Image.new("L", (64, 64))
    font = ImageFont.load_default(rng.randint(44, 56))
    place = (32 + rng.randint(-4, 4), 32 + rng.randint(-4, 4))
    ImageDraw.Draw(image).text(place, letter, fill=255, font=font, anchor="mm")
    return image.rotate(rng.uniform(-12, 12))


def percent(share: float) -> str:
    return "over 99%" if share > 0.99 else "below 1%" if share < 0.01 else f"{100 * share:.0f}%"


def ask(image: str | None, model: Any) -> tuple[str, dict[str, float]]:
    """What the model says of an image, by both routers, and how likely the best classes are."""
    if image is None:
        return "## Choose an image", {}
    model.set_router("entropy")
    entropy = model.predict(image)[0]
    model.set_router("auto")
    auto = model.predict(image, top_k=3)[0]
    said = "“unknown”: nothing that it was taught looks like this" if auto.unknown else f"“{auto.label}”"
    table = f"""
## It says {said}

| router | `auto` (the default) | `entropy` (the paper's) |
|---|---|---|
| answer | {"unknown, at best " * auto.unknown}{auto.label} | {entropy.label} |
| certain | {percent(auto.probability)} | {percent(entropy.probability)} |
| known | {percent(auto.known)} | does not say |
| expert | {auto.expert} | {entropy.expert} |
"""
    return table, auto.top


def examine(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """What each expert says of the digits kept back from training, and how many they get right together."""
    model.set_router("auto")
    answers = [model.classes[i] for i in model.route_features(FEATURES).logits.argmax(dim=1)]
    right = sum(answer == digit for answer, (digit, _) in zip(answers, TEST, strict=True))
    return {name: model.expert_logits(FEATURES, name) for name in model.experts}, right


def compare(before: tuple[dict[str, torch.Tensor], int], after: tuple[dict[str, torch.Tensor], int]) -> str:
    """Sentences on what a change of the experts has changed."""
    kept = before[0].keys() & after[0].keys()
    same = sum(torch.equal(before[0][name], after[0][name]) for name in kept)
    return (
        f"Of {len(TEST)} digits kept back from training, {before[1]} were right before and {after[1]} are now. "
        f"{same} of {len(kept)} other experts score them as before, to the last bit."
    )


def list_experts(model: Any) -> Any:
    experts = [(f"{', '.join(classes)} ({name})", name) for name, classes in model.experts.items()]
    return gr.Radio(experts, value=experts[-1][1])


def draw_ten(model: Any) -> tuple[str, list[Image.Image]]:
    """Ten pictures of the first letter that the model was not taught."""
    letter = next((letter for letter in ascii_uppercase if letter not in model.classes), "A")
    return letter, [draw_letter(letter, seed) for seed in range(10)]


def teach(name: str, gallery: list[Any] | None, model: Any) -> tuple[Any, str, Any]:
    name = name.strip()
    if not (name.replace(" ", "").isalnum() and gallery):
        raise gr.Error("Give the class a name of letters and digits, and at least one picture.")
    before, start = examine(model), time.time()
    expert = next(lesson for i in count(1) if (lesson := f"lesson_{i}") not in model.experts)
    model = learn(model, {expert: {name: [path for path, _ in gallery]}})
    news = f"### Learnt “{name}” from {len(gallery)} pictures in {time.time() - start:.1f} seconds\n"
    return model, news + compare(before, examine(model)), list_experts(model)


def forget(expert: str, model: Any) -> tuple[str, Any]:
    before = examine(model)
    model.delete_adapter(expert)
    return f"### Forgotten: {expert}\n{compare(before, examine(model))}", list_experts(model)


# Handwritten digits of 8x8 pixels. Every sixth is kept back from training.
data = load_digits()
digits = [
    (str(digit), Image.fromarray((pixels * (255 / 16)).astype("uint8")))
    for digit, pixels in zip(data.target, data.images, strict=True)
]
TRAIN = [row for i, row in enumerate(digits) if i % 6]
TEST = [(digit, image) for digit, image in digits[::6] if digit in "012345"]

# The experts that everyone begins with are trained once.
first = learn(
    AutoModelForImageClassification.from_pretrained(BACKBONE, num_labels=0),
    {task: {c: [image for digit, image in TRAIN if digit == c] for c in pair} for task, pair in PAIRS.items()},
)
save_experts(first, FOLDER / "experts")
# The backbone is frozen, so that one pass over the test images is enough for all lessons of all visitors.
FEATURES = first.pooled_features(pixel_values(first, [image for _, image in TEST])).detach()
answers = first.route_features(FEATURES)
meaning = MEANING.format(
    count=len(TEST),
    right=examine(first)[1],
    certain=percent(float(answers.confidence.mean())),
    unknown=percent(float(answers.unknown.float().mean())),
)
examples = {"A": draw_letter("A", 99), "B": draw_letter("B", 99)}
examples |= {digit: next(image for of, image in digits[::6] if of == digit) for digit in "01234567"}
paths = [str(FOLDER / f"{name}.png") for name in examples]
for path, image in zip(paths, examples.values(), strict=True):
    image.save(path)  # a digit in its 8x8 pixels, as those in training
said, likely = ask(paths[0], first)

with gr.Blocks(title="peft_luca: teach a frozen model a new class") as demo:
    model = gr.State()
    gr.Markdown(INTRODUCTION)
    gr.Markdown("## 1. Teach it a class")
    with gr.Row():
        with gr.Column():
            gallery = gr.Gallery(
                label="About ten pictures", file_types=["image"], format="png", object_fit="contain", elem_id="gallery"
            )
        with gr.Column():
            name = gr.Textbox(label="Name of the class", max_length=20, elem_id="name")
            with gr.Row():
                draw = gr.Button("Draw ten letters for me")
                start = gr.Button("Teach", variant="primary")
            news = gr.Markdown(HOW_TO, elem_id="news")
    gr.Markdown("## 2. Ask it")
    with gr.Row():
        with gr.Column():
            # As a path and in its own mode: `predict` reads the file as training did.
            asked = gr.Image(
                paths[0],
                type="filepath",
                image_mode=None,
                sources=["upload", "clipboard"],
                show_label=False,
                height=260,
                elem_id="image",
            )
            label = "Letters, digits that it was taught, and 6 and 7, which it was not"
            gr.Examples(paths, asked, label=label, elem_id="examples")
        with gr.Column():
            answer = gr.Markdown(said, elem_id="answer")
            classes = gr.Label(likely, label="The three best classes, by auto", show_heading=False, elem_id="classes")
    gr.Markdown(meaning)
    gr.Markdown("## 3. Let it forget")
    with gr.Row():
        with gr.Column():
            experts = gr.Radio(label="Experts, by their classes", elem_id="experts")
        with gr.Column():
            drop = gr.Button("Forget this expert")
            forgotten = gr.Markdown("What is left is exactly the model that never had it.", elem_id="forgotten")

    one_by_one: dict[str, Any] = {"concurrency_id": "model"}  # or else a visitor may ask while the model learns
    to_ask = ask, [asked, model], [answer, classes]
    demo.load(new_model, None, model, **one_by_one).then(list_experts, model, experts)
    asked.change(*to_ask, **one_by_one)
    draw.click(draw_ten, model, [name, gallery])
    taught = start.click(teach, [name, gallery, model], [model, news, experts], **one_by_one)
    taught.success(*to_ask, **one_by_one)
    drop.click(forget, [experts, model], [forgotten, experts], **one_by_one).success(*to_ask, **one_by_one)

if __name__ == "__main__":
    # Nothing is fetched from elsewhere: the theme's own fonts would be.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    demo.launch(theme=theme, css=CSS, show_error=True)
