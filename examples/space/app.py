"""
A demonstration in the browser: drop an image, see how certain each expert is and who answers; teach a task from a few
images, see that the experts of before say what they said, and forget a task again. It needs no network.

    python examples/space/app.py
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image, ImageDraw, ImageFont
from PIL.Image import fromarray
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
FIRST_TASKS = {"zero_one": (0, 1), "two_three": (2, 3), "four_five": (4, 5)}
ROUTERS = {
    "statistics of the features (gaussian)": "gaussian",
    "the most certain expert (entropy, the paper's)": "entropy",
}
INTRODUCTION = """
# One expert per task

A frozen vision transformer, which had only ever seen letters, has learnt six handwritten digits: one small LuCA expert
for each pair. Every image is shown to all experts, and nobody says which task it belongs to.
"""


def as_dataset(images: list[Image.Image], labels: list[int], names: list[str]) -> Dataset:
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"image": images, "label": labels}, features=features)


def digit_images() -> dict[int, list[Image.Image]]:
    data = load_digits()
    images: dict[int, list[Image.Image]] = {digit: [] for digit in range(10)}
    for image, digit in zip(data.images, data.target.tolist(), strict=True):
        images[digit].append(fromarray((image * (255 / 16)).astype("uint8")))
    return images


def draw_letter(letter: str, seed: int) -> Image.Image:
    """A letter in white on black, a little turned and out of place, so that no two are alike."""
    rng = random.Random(f"{letter} {seed}")
    image = Image.new("L", (64, 64))
    font = ImageFont.load_default(rng.randint(44, 56))
    place = (32 + rng.randint(-4, 4), 32 + rng.randint(-4, 4))
    ImageDraw.Draw(image).text(place, letter, fill=255, font=font, anchor="mm")
    return image.rotate(rng.uniform(-12, 12))


class Pupil:
    """A model that one visitor teaches."""

    folder = ""  # of the experts that everyone begins with
    probes: ClassVar[dict[int, list[Image.Image]]] = {}  # digits that none of them was trained on

    def __init__(self) -> None:
        self.processor = AutoImageProcessor.from_pretrained(BACKBONE)
        self.model: Any = AutoModelForImageClassification.from_pretrained(BACKBONE, num_labels=0)
        self.lessons = 0
        if self.folder:
            self.model = load_experts(self.model, self.folder)

    @classmethod
    def prepare(cls) -> None:
        """Learn the first tasks, once for all visitors."""
        images = digit_images()
        cls.probes = {digit: images[digit][-25:] for digit in range(6)}
        first = cls()
        for name, (one, other) in FIRST_TASKS.items():
            classes = {str(digit): images[digit][:-25] for digit in (one, other)}
            first.learn(name, classes)
        folder = mkdtemp()
        save_experts(first.model, folder)
        cls.folder = folder

    def learn(self, name: str, images: dict[str, list[Image.Image]]) -> None:
        """A new expert from images by class name."""
        names = list(images)
        labels = [label for label, of_class in enumerate(images.values()) for _ in of_class]
        dataset = as_dataset([image for of_class in images.values() for image in of_class], labels, names)
        trainer = ContinualTrainer(
            model=self.model,
            args=ContinualTrainingArguments(mkdtemp(), router="gaussian", logging_strategy="no", disable_tqdm=True),
            stream=TaskStream.from_tasks({name: dataset}),
            processing_class=self.processor,
        )
        trainer.train()
        self.model = trainer.model

    def ask(self, image: Image.Image, router: str) -> tuple[dict[str, float], dict[str, float], str]:
        """How certain each expert is, how likely each class is, and a sentence."""
        self.model.set_router(router)
        routed = self.model.route(pixel_values(self.model, [image], self.processor))
        experts, classes = self.model.experts, self.model.classes
        posterior = routed.logits.softmax(dim=-1)[0]
        if routed.entropies is None:  # a router of statistics: an expert is as likely as its classes are
            certainty = {name: sum(float(posterior[classes.index(c)]) for c in of) for name, of in experts.items()}
        else:  # 1 where an expert is sure, 0 where all classes are alike to it
            most = torch.log(torch.tensor(float(max(2, len(classes)))))
            certainty = dict(zip(experts, (1 - routed.entropies[0] / most).clamp(min=0).tolist(), strict=True))
        answer, chosen = classes[int(posterior.argmax())], list(experts)[int(routed.expert)]
        confidence = f"{float(routed.confidence):.0%}"
        sentence = f"## It says “{answer}”\nThe expert **{chosen}** answered, with a confidence of {confidence}."
        return certainty, dict(zip(classes, posterior.tolist(), strict=True)), sentence

    def witness(self) -> tuple[dict[str, torch.Tensor], list[str], float]:
        """What every expert says of the digits kept back, who answers what, and how much of it is right."""
        self.model.set_router("gaussian")
        images = [image for of_digit in self.probes.values() for image in of_digit]
        features = self.model.pooled_features(pixel_values(self.model, images, self.processor))
        with torch.no_grad():
            said = {name: self.model.expert_logits(features, name) for name in self.model.experts}
        answers = [self.model.classes[i] for i in self.model.route_features(features).logits.argmax(dim=1).tolist()]
        truth = [str(digit) for digit, of_digit in self.probes.items() for _ in of_digit]
        right = sum(a == t for a, t in zip(answers, truth, strict=True)) / len(truth)
        return said, answers, right

    def compare(self, before: tuple[Any, Any, float]) -> str:
        """Sentences on what a change of the experts has changed."""
        said, answers, right = self.witness()
        kept = [name for name in said if name in before[0]]
        same = sum(torch.equal(said[name], before[0][name]) for name in kept)
        alike = sum(now == then for now, then in zip(answers, before[1], strict=True))
        return (
            f"- {same} of {len(kept)} earlier experts give {len(answers)} test digits the scores that they gave "
            f"before, to the last bit.\n- {alike} of {len(answers)} answers are the same as before; {before[2]:.0%} "
            f"were right, {right:.0%} are now."
        )


def experts_table(pupil: Pupil) -> list[list[str]]:
    return [[name, ", ".join(classes)] for name, classes in pupil.model.experts.items()]


def refresh(pupil: Pupil) -> tuple[Any, Any]:
    """The list of experts, and the choice of those that can be forgotten."""
    names = list(pupil.model.experts)
    return experts_table(pupil), gr.Dropdown(choices=names, value=names[-1])


def ask(image: Image.Image | None, router: str, session: dict[str, Pupil]) -> tuple[Any, Any, Any]:
    if image is None:
        return None, None, "Drop an image, or take one of the examples."
    return pupil_of(session).ask(image, ROUTERS[router])


def teach(
    name_1: str, images_1: list[Any] | None, name_2: str, images_2: list[Any] | None, session: dict[str, Pupil]
) -> tuple[Any, ...]:
    given = {}
    for name, images in ((name_1, images_1), (name_2, images_2)):
        if name.strip() and images:
            given[name.strip()] = [image for image, _ in images]
    if len(given) < 2:
        raise gr.Error("A task needs two classes: give both a name of its own, and at least one image each.")
    pupil = pupil_of(session)
    before = pupil.witness()
    pupil.lessons += 1
    try:
        pupil.learn(f"lesson_{pupil.lessons}", given)
    except ValueError as error:
        raise gr.Error(str(error)) from error
    news = f"### Learnt: {', '.join(given)}\n{pupil.compare(before)}"
    return news, *refresh(pupil)


def forget(name: str, session: dict[str, Pupil]) -> tuple[Any, ...]:
    pupil = pupil_of(session)
    before = pupil.witness()
    try:
        pupil.model.delete_adapter(name)
    except ValueError as error:
        raise gr.Error(str(error)) from error
    return f"### Forgotten: {name}\n{pupil.compare(before)}", *refresh(pupil)


def letters() -> tuple[str, list[Image.Image], str, list[Image.Image]]:
    return "A", [draw_letter("A", i) for i in range(12)], "B", [draw_letter("B", i) for i in range(12)]


def pupil_of(session: dict[str, Pupil]) -> Pupil:
    """A visitor's own pupil, made when first needed: what one visitor teaches does not touch the others."""
    if "pupil" not in session:
        session["pupil"] = Pupil()
    return session["pupil"]


def build() -> gr.Blocks:
    Pupil.prepare()
    folder = Path(mkdtemp())
    examples = [(digit, Pupil.probes[digit][3]) for digit in range(6)] + [(c, draw_letter(c, 99)) for c in "AB"]
    for name, image in examples:
        image.resize((128, 128), Image.Resampling.NEAREST).save(folder / f"{name}.png")

    with gr.Blocks(title="peft_luca: one expert per task") as demo:
        session = gr.State({}, time_to_live=3600)
        gr.Markdown(INTRODUCTION)
        with gr.Row():
            with gr.Column():
                image = gr.Image(type="pil", label="An image", height=260, sources=["upload", "clipboard"])
                router = gr.Radio(list(ROUTERS), value=next(iter(ROUTERS)), label="Who decides")
                gr.Examples(
                    [str(folder / f"{name}.png") for name, _ in examples], image, label="Examples", examples_per_page=8
                )
            with gr.Column():
                sentence = gr.Markdown("Drop an image, or take one of the examples.", elem_id="sentence")
                experts = gr.Label(label="How certain each expert is", num_top_classes=8, elem_id="experts")
                classes = gr.Label(label="Classes of all experts", num_top_classes=4, elem_id="classes")
        gr.Markdown("## Teach it a task of two classes")
        with gr.Row():
            galleries = []
            for i in (1, 2):
                with gr.Column():
                    name = gr.Textbox(label=f"Name of class {i}", elem_id=f"name_{i}")
                    gallery = gr.Gallery(label=f"Images of class {i}", type="pil", columns=4, height=220)
                    galleries += [name, gallery]
        with gr.Row():
            fill = gr.Button("Take drawn letters A and B")
            learn = gr.Button("Teach", variant="primary")
        news = gr.Markdown(elem_id="news")
        gr.Markdown("## Experts")
        with gr.Row():
            table = gr.Dataframe(headers=["expert", "classes"], interactive=False, elem_id="table")
            with gr.Column():
                choice = gr.Dropdown([], label="Forget", elem_id="choice")
                drop = gr.Button("Forget this expert")

        asked = [image, router, session], [experts, classes, sentence]
        gr.on([image.change, router.change], ask, *asked)
        fill.click(letters, None, galleries)
        learn.click(teach, [*galleries, session], [news, table, choice]).success(ask, *asked)
        drop.click(forget, [choice, session], [news, table, choice]).success(ask, *asked)
        demo.load(lambda session: refresh(pupil_of(session)), session, [table, choice])
    return demo


if __name__ == "__main__":
    # Nothing is fetched from elsewhere: the theme's own fonts would be.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    build().launch(theme=theme)
