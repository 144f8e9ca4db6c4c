"""[CLS] of images, once each; and what is known of a backbone by itself: its fingerprint and its reference."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm


REFERENCE_PICTURES = 192
REFERENCE_BATCH = 16
REFERENCE_SEED = 0
# A trunk that interpolates its positions is shown pictures of this many patches a side, which takes seconds where its
# own size would take minutes. Another trunk takes pictures of its own size only.
REFERENCE_PATCHES = 8
INTERPOLATING = ("dinov2", "dinov2_with_registers")

Reference = tuple[Tensor, Tensor]  # mean and deviation of [CLS], (d,) each


def draw_reference_pictures(count: int, size: int, seed: int = REFERENCE_SEED) -> np.ndarray:
    """
    The reference pictures: one to eight ellipses and boxes of random colours on a plain ground. The same on every
    machine for the same arguments.

    Args:
        count (`int`): How many; a smaller set is the beginning of a larger one.
        size (`int`): Side in pixels.
        seed (`int`, *optional*, defaults to `0`): Seed.

    Returns:
        `numpy.ndarray` of shape `(count, size, size, 3)`: uint8, RGB.
    """
    rng = np.random.RandomState(seed)  # the legacy generator's stream is frozen across versions of numpy
    y, x = np.mgrid[0:size, 0:size] / size
    pictures = np.empty((count, size, size, 3), np.uint8)
    for picture in pictures:
        picture[:] = rng.randint(0, 256, 3)
        for _ in range(rng.randint(1, 9)):
            center_x, center_y, width, height = rng.uniform(0, 1, 4)
            color = rng.randint(0, 256, 3)
            u, v = abs(x - center_x) / (width / 2 + 0.02), abs(y - center_y) / (height / 2 + 0.02)
            picture[(u * u + v * v < 1) if rng.randint(2) else (np.maximum(u, v) < 1)] = color
    return pictures


class BackboneFacts:
    """
    What is known of a backbone by itself, whatever its experts: computed once for the weights that it has.

    Attributes:
        fingerprint (`str` or `None`):
            SHA-256 over the sorted digests of the trunk's tensors, without the head and without names. `None` while
            the weights are on the meta device.
    """

    _known: ClassVar[WeakKeyDictionary[nn.Module, BackboneFacts]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, tensors: list[Tensor], version: Any) -> None:
        self.version = version
        self.fingerprint = None if any(t.is_meta for t in tensors) else fingerprint(tensors)
        config = getattr(model, "config", None)
        self.model_type = getattr(config, "model_type", None)
        self.image_size = _first(getattr(config, "image_size", None))
        self.patch_size = _first(getattr(config, "patch_size", None))
        self.channels = getattr(config, "num_channels", 3)
        first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        self.device = None if first is None else first.device
        self.dtype = None if first is None else first.dtype
        self._reference: Reference | None = None

    @classmethod
    def of(cls, model: nn.Module, head_name: str) -> BackboneFacts:
        """Facts of a model whose head is called `head_name`, anew only when a tensor of the trunk was changed."""
        tensors = [
            value
            for name, value in model.state_dict().items()
            if not name.startswith(f"{head_name}.") and isinstance(value, Tensor)
        ]
        version = tuple((t.data_ptr(), t._version) for t in tensors if not t.is_inference())
        facts = cls._known.get(model)
        if facts is None or facts.version != version:
            facts = cls._known[model] = cls(model, tensors, version)
        return facts

    @torch.no_grad()
    def reference(self, read: Callable[[Tensor], Tensor]) -> Reference:
        """
        Mean and deviation of [CLS] over the reference pictures, in float32.

        Args:
            read (function): pixel values `(batch, channels, size, size)`, in [-1, 1], → [CLS] `(batch, d)`.

        Raises:
            ValueError: the backbone's config does not say what images it takes.
        """
        if self._reference is None:
            size = self.image_size
            if size is None or self.dtype is None:
                raise ValueError(
                    "the reference needs config.image_size and the backbone's weights, and this model lacks them. Use "
                    "LucaConfig(reference=False) to train on [CLS] as it is."
                )
            if self.model_type in INTERPOLATING and self.patch_size:
                size = min(size, REFERENCE_PATCHES * self.patch_size)
            pictures = torch.from_numpy(draw_reference_pictures(REFERENCE_PICTURES, size)).permute(0, 3, 1, 2)
            if self.channels != 3:
                pictures = pictures.float().mean(dim=1, keepdim=True).expand(-1, self.channels, -1, -1)
            features = [
                read((batch.to(self.device) / 127.5 - 1).to(self.dtype)).double()
                for batch in tqdm(pictures.split(REFERENCE_BATCH), desc="Reference pictures", leave=False, delay=2)
            ]
            z = torch.cat(features)  # (pictures, d)
            # A dimension that never moves says nothing: leave it as it is.
            std = z.std(dim=0)
            self._reference = (z.mean(dim=0).float(), torch.where(std > 1e-6, std, torch.ones_like(std)).float())
        return self._reference


def fingerprint(tensors: list[Tensor]) -> str:
    """SHA-256 over the sorted digests of tensors: of their type, shape and bytes, not of their names or order."""
    digests = []
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter):  # torchao's quantised tensors have no bytes of their own
            tensor = tensor.dequantize()
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digests.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def reference_distance(saved: Reference, measured: Reference) -> float:
    """How far two references are apart, in deviations: root mean square over the dimensions of [CLS]."""
    (mean, std), (other_mean, other_std) = saved, measured
    if mean.shape != other_mean.shape:
        return float("inf")
    shift = (other_mean.to(mean.device) - mean) / std
    spread = torch.log(other_std.to(std.device) / std)
    return float(torch.maximum(shift.square().mean(), spread.square().mean()).sqrt())


def _first(value: Any) -> int | None:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return first if isinstance(first, int) else None


class FeatureDataset(Dataset[dict[str, Tensor]]):
    """
    [CLS] of a task's images with their labels, in memory.

    Args:
        features (`torch.Tensor` of shape `(images, d)`): [CLS] vectors.
        labels (`torch.Tensor` of shape `(images,)`): Class ids.
    """

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features = features
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": self.features[index], "labels": self.labels[index]}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        # A whole batch at once: the loader's default, row by row and stacked again, costs more than the training step.
        return {"features": self.features[indices], "labels": self.labels[indices]}

    @staticmethod
    def collate(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a loader's `collate_fn` has left to do: nothing."""
        return batch


def extract_features(
    read: Callable[[Tensor], Tensor],
    dataset: Any,
    collator: Callable[[list[dict[str, Any]]], dict[str, Tensor]],
    batch_size: int,
    num_workers: int = 0,
    description: str = "Extracting features",
    disable_tqdm: bool = False,
) -> FeatureDataset:
    """
    One pass of the backbone over a dataset.

    Args:
        read (function): pixel values `(batch, channels, height, width)` → [CLS] `(batch, d)`.
        dataset (`datasets.Dataset`): Rows of an image and its label.
        collator (function): Rows → `pixel_values` and `labels`.
        batch_size (`int`): Images in a pass.
        num_workers (`int`, *optional*, defaults to `0`): Processes that decode and preprocess images.
        description (`str`, *optional*): What the progress bar says.
        disable_tqdm (`bool`, *optional*, defaults to `False`): No progress bar.

    Returns:
        [`FeatureDataset`]: [CLS] in float32 on the CPU, in the dataset's order.
    """

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=batch_size, collate_fn=collator, num_workers=num_workers
        )
        with tqdm(total=len(dataset), desc=description, unit="img", leave=False, disable=disable_tqdm) as bar:
            for batch in loader:
                yield read(batch["pixel_values"]).float().cpu(), batch["labels"]
                bar.update(len(batch["labels"]))

    features, labels = zip(*batches(), strict=True)
    return FeatureDataset(torch.cat(features), torch.cat(labels))


class ImageCollator:
    """
    Rows of a dataset → a batch of pixel values, by an image processor.

    Args:
        processing_class (`BaseImageProcessor`): The backbone's image processor.
        image_column (`str`): Column of the images.
        label_ids (`dict[int, int]`, *optional*): Ids to give in place of the rows' labels.
        augmentation (`bool`, *optional*, defaults to `False`):
            Random resized crop (scale 0.05 to 1) and horizontal flip, as the authors' code trains with.
    """

    def __init__(
        self,
        processing_class: Any,
        image_column: str,
        label_ids: dict[int, int] | None = None,
        augmentation: bool = False,
    ) -> None:
        self.processing_class = processing_class
        self.image_column = image_column
        self.label_ids = label_ids
        self.augmentation = augmentation

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        images = [to_rgb(row[self.image_column]) for row in rows]
        sized = {}
        if self.augmentation:
            height, width = image_size(self.processing_class)
            images = [random_crop_and_flip(image, height, width) for image in images]
            sized = {"do_resize": False, "do_center_crop": False}
        batch = {"pixel_values": self.processing_class(images=images, return_tensors="pt", **sized)["pixel_values"]}
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([self._label(row["labels"]) for row in rows])
        return batch

    def _label(self, label: int) -> int:
        if self.label_ids is None:
            return label
        if label not in self.label_ids:
            raise ValueError(
                f"an image has the label {label}, but the experts' classes are the labels {sorted(self.label_ids)}. "
                "Labels are the stream's global ids, stream.classes.index(name)."
            )
        return self.label_ids[label]


def to_rgb(image: Image.Image) -> Image.Image:
    """The image upright and in RGB."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, and PIL does not warn
    return image.convert("RGB")


def image_size(processing_class: Any) -> tuple[int, int]:
    """Height and width of what an image processor makes, in pixels."""
    for size in (getattr(processing_class, "crop_size", None), getattr(processing_class, "size", None)):
        if size and "height" in size and "width" in size:
            return size["height"], size["width"]
    side = (getattr(processing_class, "size", None) or {}).get("shortest_edge")
    if side is None:
        raise ValueError(
            f"augmentation needs the size of the images, but {type(processing_class).__name__} has neither crop_size "
            f"nor size with height and width (size: {getattr(processing_class, 'size', None)})."
        )
    return side, side


def random_crop_and_flip(image: Image.Image, height: int, width: int) -> Image.Image:
    """
    A random part of 5 % to 100 % of the image's area and of 3:4 to 4:3, resized to `(height, width)` with bicubic
    interpolation, mirrored in one case of two. Drawn from torch's generator, which a loader seeds in every worker.
    """
    for _ in range(10):
        area = image.width * image.height * float(torch.empty(()).uniform_(0.05, 1.0))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3))))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= image.width and 0 < h <= image.height:
            left = int(torch.randint(image.width - w + 1, ()))
            top = int(torch.randint(image.height - h + 1, ()))
            break
    else:  # an image much longer than it is wide has no such part: take its middle
        w = h = min(image.width, image.height)
        left, top = (image.width - w) // 2, (image.height - h) // 2
    image = image.resize((width, height), Image.Resampling.BICUBIC, box=(left, top, left + w, top + h))
    return ImageOps.mirror(image) if float(torch.rand(())) < 0.5 else image
