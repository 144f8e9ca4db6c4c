"""Make `letters-vit`, the small pretrained ViT of the default demonstration, or measure the one that is there.

    python examples/assets/make_backbone.py            # render letters, train, save, measure
    python examples/assets/make_backbone.py --check    # only measure what is saved

The network learns to tell letters of many alphabets apart, drawn with Pillow from whatever free fonts are found in
matplotlib's own folder and under /usr/share/fonts. Letters are Unicode category L without a numeric value, so no digit
is ever drawn. Hebrew and Georgian, and a tenth of the font families, are kept for validation. scikit-learn's
handwritten digits are used only in `measure`, after the weights are saved.

Needs torch, transformers, scikit-learn, pillow, matplotlib and fonttools. Fewer fonts: fewer classes.
The fonts of the saved weights are those of matplotlib and these Debian 12 packages:

    apt-get install --no-install-recommends culmus fonts-anonymous-pro fonts-aoyagi-soseki fonts-averia-sans-gwf \
        fonts-beteckna fonts-bpg-georgian fonts-breip fonts-bwht fonts-comfortaa fonts-comic-neue fonts-dancingscript \
        fonts-dejavu fonts-dkg-handwriting fonts-dosis fonts-dustin fonts-ecolier-court fonts-essays1743 \
        fonts-fantasque-sans fonts-femkeklaver fonts-freefont-ttf fonts-georgewilliams fonts-gfs-didot \
        fonts-gfs-neohellenic fonts-gfs-olga fonts-gfs-solomos fonts-go fonts-humor-sans fonts-inconsolata \
        fonts-isabella fonts-jetbrains-mono fonts-joscelyn fonts-jura fonts-kaushanscript fonts-kiloji fonts-kristi \
        fonts-lato fonts-leckerli-one fonts-levien-typoscript fonts-liberation fonts-linuxlibertine fonts-lobstertwo \
        fonts-monofur fonts-national-park fonts-noto-core fonts-ocr-b fonts-oldstandard fonts-open-sans \
        fonts-opendyslexic fonts-osifont fonts-paratype fonts-play fonts-quicksand fonts-roboto-unhinted \
        fonts-routed-gothic fonts-rufscript fonts-seto fonts-sil-andika fonts-sil-gentiumplus fonts-sjfonts \
        fonts-thai-tlwg-ttf fonts-tomsontalks fonts-tuffy fonts-urw-base35 fonts-vlgothic fonts-yanone-kaffeesatz \
        fonts-yusei-magic
"""

import argparse
import copy
import json
import math
import re
import time
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from fontTools.ttLib import TTFont, TTLibError
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)


HERE = Path(__file__).parent
IMAGE_SIZE = 32
PEAK_LR = 2e-3
GLYPH_SIZE, GLYPH_INK = 48, 40  # a stored glyph: its longer side is 40 of 48 pixels


def _span(first: int, last: int, step: int = 1) -> str:
    return "".join(map(chr, range(first, last + 1, step)))


# Letters that only repeat another one's shape (c/C, Cyrillic A, Greek omicron, ...) are left out.
ALPHABETS = {
    "Latin": "ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijklmnpqrtyÆŒØßÞð",
    "Greek": "ΓΔΘΛΞΠΣΦΨΩαβγδεζηθλμξπρςστφχψω",
    "Cyrillic": "БДЖЗИЛЦЧШЩЪЫЭЮЯЂЉЊЏЄѢбф",
    "Armenian": _span(0x531, 0x556) + _span(0x561, 0x586),
    "Thai": _span(0xE01, 0xE2E),
    "Lao": _span(0xE81, 0xEAE),
    "Hiragana": "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわをん",
    "Katakana": "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワヲン",
    "Devanagari": _span(0x905, 0x939),
    "Gujarati": _span(0xA85, 0xAB9),
    "Tamil": _span(0xB85, 0xBB9),
    "Arabic": _span(0x621, 0x64A),
    "Ethiopic": _span(0x1200, 0x1350, 8),
    "Cherokee": _span(0x13A0, 0x13F4),
    "Runic": _span(0x16A0, 0x16EA),
    "Ol Chiki": _span(0x1C5A, 0x1C77),
    "Glagolitic": _span(0x2C00, 0x2C2E),
    "Tifinagh": _span(0x2D30, 0x2D65),
}
HELD_OUT_ALPHABETS = {"Hebrew": _span(0x5D0, 0x5EA), "Georgian": _span(0x10D0, 0x10F0)}

# Fonts whose Latin code points hold something else.
NOT_LETTERS = re.compile(r"symbol|dingbat|D050000|cmsy|cmex|cmmi|stixsiz|nonuni|last ?resort|emoji|music|math", re.I)
# Families drawn by hand: they are few, and nearest to what a pen does, so they are drawn more often.
HANDWRITTEN = re.compile(
    r"breip|dancing|dkg|humor|xkcd|ecolier|femke|comic|kristi|kaushan|rufscript|bwht|kiloji|seto|aoyagi|joscelyn"
    r"|delphine|jenna|because|isabella|typo|yusei|tomson|leckerli|lobster|andika|purisa|solomos|olga|sjfont|steve"
    r"|domestic|penguin|chancery",
    re.I,
)


@dataclass
class Glyphs:
    """Rendered letters: images (n, 48, 48) in bytes, class of each, whether its font is held out, draw weight."""

    images: Tensor
    labels: Tensor
    held_out: Tensor
    weights: Tensor
    classes: str
    faces: int
    families: int


def letters(alphabets: dict[str, str]) -> str:
    """The letters of `alphabets`, assigned code points of category L without any numeric value."""
    text = "".join(alphabets.values())
    return "".join(c for c in text if unicodedata.category(c)[0] == "L" and not c.isnumeric())


def find_fonts() -> Iterator[tuple[str, Path, set[int]]]:
    """Yields family, path and covered code points of every usable font, once per family and style."""
    folders = (Path(matplotlib.get_data_path()) / "fonts", Path("/usr/share/fonts"))
    seen = set()
    for path in sorted(p for f in folders for p in f.rglob("*") if p.suffix.lower() in {".ttf", ".otf"}):
        try:
            with TTFont(path, lazy=True) as font:
                family = str(font["name"].getDebugName(16) or font["name"].getDebugName(1) or path.stem)
                style = str(font["name"].getDebugName(17) or font["name"].getDebugName(2))
                covered = set(font.getBestCmap() or ())
        except (TTLibError, KeyError, AssertionError, UnicodeDecodeError):
            continue  # a broken or bitmap-only file
        if (family, style) not in seen and not NOT_LETTERS.search(f"{family} {path.stem}"):
            seen.add((family, style))
            yield family, path, covered


def draw(font: ImageFont.FreeTypeFont, letter: str) -> Image.Image | None:
    """One letter, cropped to its ink and fitted into the middle of a glyph image; None if it leaves no ink."""
    left, top, right, bottom = font.getbbox(letter)
    if right - left < 2 or bottom - top < 2 or max(right - left, bottom - top) > 400:
        return None
    image = Image.new("L", (int(right - left) + 8, int(bottom - top) + 8))
    ImageDraw.Draw(image).text((4 - left, 4 - top), letter, fill=255, font=font)
    ink = image.getbbox()
    if ink is None:
        return None
    image = image.crop(ink)
    ratio = GLYPH_INK / max(image.size)
    image = image.resize(
        (max(1, round(image.width * ratio)), max(1, round(image.height * ratio))), Image.Resampling.BICUBIC
    )
    glyph = Image.new("L", (GLYPH_SIZE, GLYPH_SIZE))
    glyph.paste(image, ((GLYPH_SIZE - image.width) // 2, (GLYPH_SIZE - image.height) // 2))
    return glyph


def render(alphabets: dict[str, str], seed: int) -> Glyphs:
    """Draws every letter of `alphabets` in every font that has it.

    A letter that looks the same as an earlier one of the same font (capitals in place of small letters, l for I, the
    box of a missing glyph) is skipped.
    """
    wanted = letters(alphabets)
    rows: list[tuple[str, str]] = []
    images, faces = [], 0
    for family, path, covered in find_fonts():
        try:
            font = ImageFont.truetype(str(path), 64, layout_engine=ImageFont.Layout.BASIC)
        except OSError:
            continue
        kept: list[np.ndarray] = []
        for letter in wanted:
            glyph = draw(font, letter) if ord(letter) in covered else None
            if glyph is None:
                continue
            small = np.asarray(glyph.resize((16, 16), Image.Resampling.BOX), np.float32).ravel()
            small /= np.linalg.norm(small)
            if kept and float(np.max(np.stack(kept) @ small)) > 0.985:
                continue
            kept.append(small)
            rows.append((family, letter))
            images.append(np.asarray(glyph))
        faces += bool(kept)
    families = sorted({family for family, _ in rows})
    chosen = np.random.default_rng(seed).permutation(len(families))[: max(1, len(families) // 10)]
    held_out_families = {families[i] for i in chosen}
    shown = {letter for family, letter in rows if family not in held_out_families}
    classes = "".join(letter for letter in wanted if letter in shown)
    keep = [i for i, (_, letter) in enumerate(rows) if letter in shown]
    # The faces of a family share a weight; a letter of many families is drawn more often, by the root of their number.
    per_family = Counter(rows)
    per_letter = Counter(letter for _, letter in per_family)
    weights = [
        (4.0 if HANDWRITTEN.search(rows[i][0]) else 1.0) / per_family[rows[i]] / per_letter[rows[i][1]] ** 0.5
        for i in keep
    ]
    return Glyphs(
        images=torch.from_numpy(np.stack([images[i] for i in keep])),
        labels=torch.tensor([classes.index(rows[i][1]) for i in keep]),
        held_out=torch.tensor([rows[i][0] in held_out_families for i in keep]),
        weights=torch.tensor(weights),
        classes=classes,
        faces=faces,
        families=len(families),
    )


def augment(glyphs: Tensor, rng: torch.Generator, coarse: float = 0.5) -> Tensor:
    """Distorts glyphs and turns them into pixel values.

    Args:
        glyphs (`torch.Tensor`): bytes, (n, 48, 48).
        rng (`torch.Generator`): source of every random choice.
        coarse (`float`, *optional*, defaults to `0.5`):
            Share that is made black and white, counted in 4x4 blocks (8x8 pixels of 17 grey levels) and enlarged.

    Returns:
        `torch.Tensor`: (n, 3, 32, 32) in [-1, 1], light on dark four times of five.
    """
    n = len(glyphs)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n, 1, 1, 1).uniform_(low, high, generator=rng)

    def normal(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=rng)

    # Affine: the matrix takes output to input coordinates, both in [-1, 1].
    angle, shear = (normal() * 0.13).clamp(-0.35, 0.35), (normal() * 0.2).clamp(-0.5, 0.5)
    zoom = GLYPH_INK / GLYPH_SIZE / uniform(0.75, 1.05).view(n)
    stretch = (normal() * 0.15).clamp(-0.35, 0.35).exp()
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([cos * zoom * stretch, (shear * cos - sin) * zoom, normal() * 0.05], 1)
    row_y = torch.stack([sin * zoom * stretch, (shear * sin + cos) * zoom, normal() * 0.05], 1)
    grid = F.affine_grid(torch.stack([row_x, row_y], 1), [n, 1, 64, 64], align_corners=False)  # (n, 64, 64, 2)
    # Elastic: a smooth random shift of every point.
    for cells, amount in ((4, 0.12), (7, 0.04)):
        shift = normal(2, cells, cells) * uniform(0, amount)
        grid = grid + F.interpolate(shift, size=64, mode="bicubic", align_corners=False).permute(0, 2, 3, 1)
    ink = F.grid_sample(glyphs.float().unsqueeze(1) / 255, grid, align_corners=False)  # (n, 1, 64, 64)

    # Stroke width: blur, then cut where the inked share is a random multiple of what it was.
    share = (ink.mean((1, 2, 3), keepdim=True) * uniform(-0.2, 0.8).exp()).clamp(0.06, 0.36)
    blurred = F.avg_pool2d(F.avg_pool2d(ink, 5, 1, 2), 3, 1, 1)
    ranked = blurred.flatten(1).sort(1, descending=True).values
    cut = ranked.gather(1, (share.view(n, 1) * 4096).long()).view(n, 1, 1, 1).clamp(min=0.02)
    ink = F.avg_pool2d(torch.sigmoid((blurred - cut) * 30), 2)  # (n, 1, 32, 32)

    # Resolution: part as block counts, a fifth untouched, the rest at a size in between.
    first, last = int(n * coarse), int(n * (coarse + (1 - coarse) * 0.6))
    counts = F.avg_pool2d((ink[:first] > 0.5).float(), 4)
    size = (10, 12, 16, 20)[int(torch.randint(4, (), generator=rng))]
    between = F.interpolate(ink[first:last], size=size, mode="area")
    enlarged = [F.interpolate(x, size=32, mode="bicubic", antialias=True) for x in (counts, between) if len(x)]
    x = torch.cat([*enlarged, ink[last:]]).clamp(0, 1)

    x = x * uniform(0.7, 1.0) + uniform(0, 0.06) * normal(1, 32, 32)
    x = torch.where(uniform(0, 1) < 0.2, 1 - x, x).clamp(0, 1)
    return (x * 2 - 1).expand(n, 3, 32, 32)


def positions(dim: int, side: int) -> Tensor:
    """Sine and cosine of row and column (side * side, dim): a start from which position embeddings learn faster."""
    frequency = 1 / 100 ** (torch.arange(dim // 4) / (dim // 4))
    wave = torch.arange(side).unsqueeze(1) * frequency  # (side, dim / 4)
    line = torch.cat([wave.sin(), wave.cos()], 1)
    return torch.cat([line.repeat_interleave(side, 0), line.repeat(side, 1)], 1)


def nearest_mean(train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray) -> float:
    """Accuracy of the class mean of greatest cosine."""
    classes = np.unique(train_labels)
    means = normalize(np.stack([train[train_labels == c].mean(0) for c in classes]))
    return float((classes[(normalize(test) @ means.T).argmax(1)] == test_labels).mean())


@torch.inference_mode()
def embed(model: ViTForImageClassification, pixels: Tensor) -> Tensor:
    """[CLS] after the last LayerNorm, (n, d), of pixels (n, 3, 32, 32): what ViT hands to its classifier."""
    model.eval()
    return torch.cat([model.vit(x).last_hidden_state[:, 0] for x in pixels.split(256)])


def train(steps: int, batch: int, seed: int) -> ViTForImageClassification:
    """Trains on letters with a cosine softmax on [CLS] and returns the moving average of the weights."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    glyphs, unseen = render(ALPHABETS, seed), render(HELD_OUT_ALPHABETS, seed)
    print(f"{len(glyphs.images)} glyphs of {len(glyphs.classes)} letters, {glyphs.faces} faces of {glyphs.families} "
          f"families; rendered in {time.perf_counter() - start:.0f} s")  # fmt: skip

    config = ViTConfig(
        hidden_size=128, num_hidden_layers=5, num_attention_heads=4, intermediate_size=512,
        image_size=IMAGE_SIZE, patch_size=4, num_labels=0, initializer_range=0.05,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    embeddings = model.vit.embeddings
    with torch.no_grad():
        embeddings.position_embeddings[0, 1:] = 0.3 * positions(config.hidden_size, IMAGE_SIZE // 4)
    average = copy.deepcopy(model)
    # Of length about 1, so that Adam's steps of fixed size can turn them quickly.
    directions = torch.nn.Parameter(torch.randn(len(glyphs.classes), config.hidden_size) * config.hidden_size**-0.5)
    scale = torch.nn.Parameter(torch.tensor(math.log(16.0)))
    parameters = [*model.parameters(), directions, scale]
    # Muon learns so small a transformer in far fewer steps than Adam, but is made for hidden matrices only.
    matrices = [p for p in model.vit.layers.parameters() if p.ndim == 2]
    others = [p for p in parameters if not any(p is m for m in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LR, weight_decay=0.05, fused=True),
    )
    whole = int(steps * 0.75)  # from here on, all patches are shown

    def some_patches(_module: torch.nn.Module, _inputs: tuple[Tensor, ...], tokens: Tensor) -> Tensor:
        """Keeps [CLS] and a random half of the patches: twice the speed, and features that do not hang on one spot."""
        kept = torch.rand(len(tokens), tokens.shape[1] - 1, generator=rng).topk(32, 1).indices + 1
        kept = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.long), kept], 1)
        return tokens.gather(1, kept.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))

    hook = embeddings.register_forward_hook(some_patches)
    weights = glyphs.weights * ~glyphs.held_out
    loss_sum = 0.0
    start = time.perf_counter()
    model.train()
    for step in range(steps):
        if step == whole:
            hook.remove()
        progress = step / steps
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = PEAK_LR * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * progress))
        chosen = torch.multinomial(weights, batch, generator=rng)
        with torch.autocast("cpu", torch.bfloat16):
            cls = model(augment(glyphs.images[chosen], rng)).logits
        cosines = F.normalize(cls.float()) @ F.normalize(directions).T  # (batch, letters)
        loss = F.cross_entropy(scale.exp() * cosines, glyphs.labels[chosen], label_smoothing=0.05)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss_sum += loss.item()
        decay = min(0.998, step / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        if (step + 1) % 250 == 0:
            print(f"step {step + 1}  loss {loss_sum / 250:.3f}  {time.perf_counter() - start:.0f} s", flush=True)
            loss_sum = 0.0

    # Validation, all at the coarse resolution: known letters in fonts not seen, and alphabets not seen.
    fonts = torch.multinomial(glyphs.weights * glyphs.held_out, 1000, generator=rng)
    cls = embed(average, augment(glyphs.images[fonts], rng, coarse=1.0))
    right = (F.normalize(cls) @ F.normalize(directions.detach()).T).argmax(1) == glyphs.labels[fonts]
    drawn = torch.multinomial(unseen.weights, 2000, replacement=True, generator=rng)
    cls, labels = embed(average, augment(unseen.images[drawn], rng, coarse=1.0)).numpy(), unseen.labels[drawn].numpy()
    means = nearest_mean(cls[:1000], labels[:1000], cls[1000:], labels[1000:])
    print(f"held-out fonts: {right.float().mean():.3f} of {len(glyphs.classes)} letters; held-out alphabets, class "
          f"means: {means:.3f} of {len(unseen.classes)} letters; scale {scale.exp().item():.1f}; "
          f"trained in {time.perf_counter() - start:.0f} s")  # fmt: skip
    return average


def save(model: ViTForImageClassification, folder: Path) -> None:
    """Writes float16 weights without a classifier, configuration and image processor."""
    copy.deepcopy(model).half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    # Empty label maps would make from_pretrained(..., num_labels=10) warn.
    config = json.loads((folder / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    processor = ViTImageProcessorPil(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        resample=Image.Resampling.BICUBIC,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        do_convert_rgb=True,
    )
    processor.save_pretrained(folder)


def measure(folder: Path) -> None:
    """Prints how well the saved [CLS] tells scikit-learn's handwritten digits apart."""
    processor = AutoImageProcessor.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder, num_labels=10, dtype=torch.float32)
    digits = load_digits()
    pictures = [Image.fromarray((image * (255 / 16)).round().astype(np.uint8)) for image in digits.images]
    start = time.perf_counter()
    pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
    ready = time.perf_counter()
    cls = embed(model, pixels).numpy()
    done = time.perf_counter()
    train_x, test_x, train_y, test_y = train_test_split(
        cls, digits.target, test_size=0.25, stratify=digits.target, random_state=0
    )
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000)).fit(train_x, train_y)
    print(f"linear probe {probe.score(test_x, test_y):.4f}  "
          f"class means {nearest_mean(train_x, train_y, test_x, test_y):.4f}  ({len(test_y)} digits)")  # fmt: skip
    print(f"{len(cls) / (done - ready):.0f} images/s forward, {len(cls) / (done - start):.0f} with the processor, "
          f"{torch.get_num_threads()} thread(s)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Make or measure letters-vit.")
    parser.add_argument("--check", action="store_true", help="only measure the saved model")
    parser.add_argument("--folder", type=Path, default=HERE / "letters-vit", help="where the model is")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=UserWarning, module="fontTools")
    if not args.check:
        save(train(args.steps, args.batch, args.seed), args.folder)
    measure(args.folder)


if __name__ == "__main__":
    main()
