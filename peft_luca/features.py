"""[CLS] of images, once each; and what is known of a backbone by itself: its fingerprint and its reference."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import datasets
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from .cache import STORAGE, PartialFeatures, read_features


REFERENCE_PICTURES = 192
REFERENCE_BATCH = 16
REFERENCE_SEED = 0
# A trunk that interpolates its positions is shown pictures of this many patches a side, which takes seconds where its
# own size would take minutes. Another trunk takes pictures of its own size only.
REFERENCE_PATCHES = 8
INTERPOLATING = ("dinov2", "dinov2_with_registers")

Reference = tuple[Tensor, Tensor]  # mean and deviation of [CLS], (d,) each

CACHE_FORMAT = 1
ROW = "__row__"  # a row's number, among its columns
# What can change the numbers without any argument changing.
PACKAGES = ("torch", "torchvision", "transformers", "pillow", "datasets")
# Of a model's config, what does not touch [CLS]. Its dtype is in the fingerprint.
NOT_OF_THE_TRUNK = (
    "id2label label2id num_labels problem_type _name_or_path name_or_path transformers_version architectures dtype "
    "torch_dtype return_dict output_attentions output_hidden_states"
).split()


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
        architecture (`dict`): The model's class and its config, without what does not touch [CLS].
    """

    _known: ClassVar[WeakKeyDictionary[nn.Module, BackboneFacts]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, tensors: list[Tensor], version: Any) -> None:
        self.version = version
        self.fingerprint = None if any(t.is_meta for t in tensors) else fingerprint(tensors)
        config = getattr(model, "config", None)
        settings: dict[str, Any] = getattr(config, "to_dict", dict)()
        self.architecture = {name: value for name, value in settings.items() if name not in NOT_OF_THE_TRUNK}
        self.architecture["class"] = type(model).__qualname__
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
    [CLS] of images with their labels. Read from a cache, the features are a view of a memory-mapped file: they take no
    memory of their own, and cannot be written to.

    Args:
        features (`torch.Tensor` of shape `(images, d)`): [CLS] vectors.
        labels (`torch.Tensor` of shape `(images,)`): Class ids.
        views (`Sequence[torch.Tensor]`, *optional*):
            [CLS] of several augmented views of the same images, of the same shape. They take turns, one per epoch.

    Attributes:
        skipped (`list[int]`): Rows of the dataset that are left out since their image could not be read.
    """

    def __init__(self, features: Tensor, labels: Tensor, views: Sequence[Tensor] = ()) -> None:
        self.features = features
        self.labels = labels
        self.views = list(views)
        self.skipped: list[int] = []

    @classmethod
    def from_file(cls, path: Path, labels: Tensor) -> FeatureDataset:
        """What [`extract_features`] wrote, with the labels of all rows of the dataset, in its order."""
        features, rows = read_features(path)
        dataset = cls(features, labels if len(rows) == len(labels) else labels[rows])
        dataset.skipped = np.setdiff1d(np.arange(len(labels)), rows.numpy()).tolist()
        return dataset

    def set_epoch(self, epoch: int) -> None:
        """Take the next view, where there are several."""
        if self.views:
            self.features = self.views[epoch % len(self.views)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": _widen(self.features[index]), "labels": self.labels[index]}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        # A whole batch at once: the loader's default, row by row and stacked again, costs more than the training step.
        rows = torch.tensor(indices, dtype=torch.long)
        return {"features": _widen(self.features.index_select(0, rows)), "labels": self.labels.index_select(0, rows)}

    @staticmethod
    def collate(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a loader's `collate_fn` has left to do: nothing."""
        return batch


def _widen(features: Tensor) -> Tensor:
    return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features


def default_cache_dir() -> Path:
    """Where [CLS] is kept unless `features_cache_dir` says otherwise: a folder in the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "peft_luca"


def features_key(backbone: BackboneFacts, collator: ImageCollator, images: str, dtype: str = "float32") -> str:
    """
    The name under which [CLS] of images is kept: a digest of everything that its numbers depend on, so that a file
    which is found is never stale. How many images pass at a time is not among it: that moves [CLS] by rounding only.

    Args:
        backbone ([`BackboneFacts`]): Its fingerprint, class and config.
        collator ([`ImageCollator`]): The image processor with its settings, the augmentation, its view and seed.
        images (`str`): [`digest_images`].
        dtype (`str`, *optional*, defaults to `"float32"`): How [CLS] is stored.
    """
    processor = collator.processing_class
    settings = processor.to_dict() if hasattr(processor, "to_dict") else None
    if settings is None or not type(processor).__module__.startswith("transformers."):
        # Code of one's own: a digest of all that pickles of it.
        settings = [settings, datasets.fingerprint.Hasher.hash(processor)]
    parts = {
        "format": CACHE_FORMAT,
        "packages": {name: _version(name) for name in PACKAGES},
        "backbone": [backbone.fingerprint, backbone.architecture],
        "processor": [f"{type(processor).__module__}.{type(processor).__qualname__}", settings],
        "augmentation": [collator.augmentation, collator.view, collator.seed if collator.augmentation else None],
        "images": images,
        "dtype": dtype,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:40]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def digest_images(dataset: Any, image_column: str) -> str:
    """
    SHA-256 over the bytes of a dataset's images in their order: of the files themselves where the dataset only holds
    paths. Labels, file names and times do not count: images are the same when their bytes are, and a file that was
    changed in place is another. Reads everything once, at about 1 GB/s, which a backbone never does.
    """
    digest = hashlib.sha256()
    images = dataset.select_columns([image_column]).cast_column(image_column, datasets.Image(decode=False))
    for rows in images.with_format("arrow").iter(batch_size=64):
        for image in rows[image_column].to_pylist():
            content = _bytes_of(image)
            digest.update(b"-1 " if content is None else f"{len(content)} ".encode())
            digest.update(content or b"")
    return digest.hexdigest()


def _bytes_of(image: dict[str, Any]) -> bytes | None:
    """An encoded image, or `None` where there is no such file."""
    content: bytes | None = image["bytes"]
    if content is None:
        try:
            with datasets.utils.file_utils.xopen(image["path"], "rb") as file:
                content = file.read()
        except OSError:
            return None
    return content


def extract_features(
    read: Callable[[Tensor], Tensor],
    dataset: Any,
    collator: ImageCollator,
    batch_size: int,
    num_workers: int = 0,
    description: str = "Extracting features",
    disable_tqdm: bool = False,
    *,
    path: Path | None = None,
    dtype: str = "float32",
    on_bad_image: str = "raise",
    writes: bool = True,
    loader_options: Mapping[str, Any] | None = None,
) -> FeatureDataset:
    """
    One pass of the backbone over a dataset, into an Arrow file of the columns `features` and `row`. What is in the
    file already is not computed again; what another process is computing is waited for; what was interrupted goes on
    at the last batch that was written down. Batches begin at the same rows whatever the number of processes, which
    take them in turns.

    Args:
        read (function): pixel values `(batch, channels, height, width)` → [CLS] `(batch, d)`.
        dataset (`datasets.Dataset`): Rows of an image and, in the column `labels`, its label.
        collator ([`ImageCollator`]): Rows → `pixel_values`.
        batch_size (`int`): Images in a pass.
        num_workers (`int`, *optional*, defaults to `0`): Processes that decode and preprocess images.
        description (`str`, *optional*): What the progress bar says.
        disable_tqdm (`bool`, *optional*, defaults to `False`): No progress bar.
        path (`Path`, *optional*): The file. Without, [CLS] is kept in memory only.
        dtype (`str`, *optional*, defaults to `"float32"`): `"float32"`, `"float16"` or `"bfloat16"`, in the file.
        on_bad_image (`str`, *optional*, defaults to `"raise"`):
            What an image does that cannot be read: `"raise"` or `"skip"`.
        writes (`bool`, *optional*, defaults to `True`): Whether this process is one that writes the file.
        loader_options (`dict`, *optional*): More arguments of the `DataLoader`.

    Returns:
        [`FeatureDataset`]: [CLS] on the CPU, in the dataset's order, in the type of the file.

    Raises:
        ValueError: an image cannot be read: with its row and its file.
        OSError: the file cannot be written.
    """
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            kept = extract_features(
                read, dataset, collator, batch_size, num_workers, description, disable_tqdm,
                path=Path(folder) / "features.arrow", dtype=dtype, on_bad_image=on_bad_image,
                loader_options=loader_options,
            )  # fmt: skip
            kept.features = kept.features.clone()
            return kept
    process, total = PartialState(), len(dataset)
    rank, processes = process.process_index, process.num_processes
    with ExitStack() as stack:
        partial = stack.enter_context(PartialFeatures.of(path, dtype)) if writes and not path.is_file() else None
        done = min(gather_object([total if partial is None else partial.rows]))
        if done < total:
            done -= done % batch_size
        if partial is not None:
            partial.go_back_to(done)
        starts = range(done, total, batch_size)
        batches: list[Any] = [range(s, min(s + batch_size, total)) for s in starts[rank::processes]]
        loader: DataLoader[Any] = DataLoader(
            _EncodedImages(dataset, collator.image_column),
            batch_sampler=batches,
            collate_fn=_ReadableImages(collator, dataset.features[collator.image_column]),
            num_workers=num_workers,
            **(loader_options or {}),
        )
        own_batches = iter(loader)
        disable_tqdm = disable_tqdm or not process.is_main_process
        with tqdm(total=total, initial=done, desc=description, unit="img", leave=False, disable=disable_tqdm) as bar:
            for first in range(0, len(starts), processes):
                part: tuple[Any, list[int]] = (None, [])
                if first + rank < len(starts):
                    pixels, bad = next(own_batches)
                    if bad and on_bad_image == "raise":
                        raise ValueError(_cannot_read(*bad[0]))
                    vectors = None if pixels is None else read(pixels).to("cpu", STORAGE[dtype][2]).contiguous()
                    part = (vectors, [row for row, *_ in bad])
                parts = gather_object([part])
                for start, (vectors, bad_rows) in zip(starts[first : first + processes], parts, strict=False):
                    rows = min(batch_size, total - start)
                    if partial is not None:
                        partial.append(rows, vectors, bad_rows)
                    bar.update(rows)
        if partial is not None:
            partial.finish()
    process.wait_for_everyone()
    features = FeatureDataset.from_file(path, _labels(dataset))
    if features.skipped and on_bad_image == "raise":
        row, image = _EncodedImages(dataset, collator.image_column)[features.skipped[0]]
        raise ValueError(_cannot_read(row, image["path"], "an earlier run has skipped it"))
    return features


def _labels(dataset: Any) -> Tensor:
    return torch.tensor(dataset.select_columns(["labels"]).with_format("arrow")[:]["labels"].to_numpy())


def _cannot_read(row: int, file: str | None, reason: str) -> str:
    return (
        f"the image in row {row} ({file or 'kept in the dataset, without a file name'}) cannot be read: {reason}. "
        "Mend it or take it out, or leave such images out with on_bad_image='skip'."
    )


class _EncodedImages(Dataset[Any]):
    """Row numbers and images of a dataset as they lie there, not decoded yet."""

    def __init__(self, dataset: Any, image_column: str) -> None:
        undecoded = datasets.Image(decode=False)
        self.images = dataset.select_columns([image_column]).cast_column(image_column, undecoded).with_format(None)
        self.image_column = image_column

    def __getitem__(self, row: int) -> tuple[int, dict[str, Any]]:
        return row, self.images[row][self.image_column]

    def __getitems__(self, rows: range) -> list[tuple[int, dict[str, Any]]]:
        return list(zip(rows, self.images[rows][self.image_column], strict=True))


class _ReadableImages:
    """Encoded images → pixel values of those that can be read, and row, file and reason of those that cannot."""

    def __init__(self, collator: ImageCollator, feature: datasets.Image) -> None:
        self.collator = collator
        self.feature = feature

    def __call__(
        self, rows: list[tuple[int, dict[str, Any]]]
    ) -> tuple[Tensor | None, list[tuple[int, str | None, str]]]:
        readable, bad = [], []
        for row, encoded in rows:
            try:
                image = to_rgb(self.feature.decode_example(encoded))
            except Exception as error:  # whatever a decoder raises at a broken file
                bad.append((row, encoded["path"], repr(error)))
            else:
                readable.append({self.collator.image_column: image, ROW: row})
        return (self.collator(readable)["pixel_values"] if readable else None), bad


class ImageCollator:
    """
    Rows of a dataset → a batch of pixel values, by an image processor.

    Args:
        processing_class (`BaseImageProcessor`): The backbone's image processor.
        image_column (`str`): Column of the images.
        label_ids (`dict[int, int]`, *optional*): Ids to give in place of the rows' labels.
        augmentation (`bool`, *optional*, defaults to `False`):
            Random resized crop (scale 0.05 to 1) and horizontal flip, as the authors' code trains with.
        view (`int`, *optional*):
            Which augmented view to draw: the same for the same seed, view and row. Without, drawn from torch's own
            generator.
        seed (`int`, *optional*, defaults to `0`): Seed of the views.
    """

    def __init__(
        self,
        processing_class: Any,
        image_column: str,
        label_ids: dict[int, int] | None = None,
        augmentation: bool = False,
        view: int | None = None,
        seed: int = 0,
    ) -> None:
        self.processing_class = processing_class
        self.image_column = image_column
        self.label_ids = label_ids
        self.augmentation = augmentation
        self.view = view
        self.seed = seed

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        if not rows:  # a process's part of a short batch: a picture that no loss counts, as a trunk needs at least one
            blank = self.processing_class(images=[Image.new("RGB", (32, 32))], return_tensors="pt")["pixel_values"]
            return {"pixel_values": blank, "labels": torch.tensor([-100])}
        images = [to_rgb(row[self.image_column]) for row in rows]
        sized = {}
        if self.augmentation:
            height, width = image_size(self.processing_class)
            draws = [self._generator(row) for row in rows]
            images = [
                random_crop_and_flip(image, height, width, draw) for image, draw in zip(images, draws, strict=True)
            ]
            sized = {"do_resize": False, "do_center_crop": False}
        batch = {"pixel_values": self.processing_class(images=images, return_tensors="pt", **sized)["pixel_values"]}
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([self._label(row["labels"]) for row in rows])
        return batch

    def _generator(self, row: dict[str, Any]) -> torch.Generator | None:
        if self.view is None:
            return None
        text = json.dumps([self.seed, self.view, row[ROW]])
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))

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


def random_crop_and_flip(
    image: Image.Image, height: int, width: int, generator: torch.Generator | None = None
) -> Image.Image:
    """
    A random part of 5 % to 100 % of the image's area and of 3:4 to 4:3, resized to `(height, width)` with bicubic
    interpolation, mirrored in one case of two. Drawn from a generator, or from torch's own, which a loader seeds in
    every worker.
    """
    for _ in range(10):
        area = image.width * image.height * float(torch.empty(()).uniform_(0.05, 1.0, generator=generator))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3), generator=generator)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= image.width and 0 < h <= image.height:
            left = int(torch.randint(image.width - w + 1, (), generator=generator))
            top = int(torch.randint(image.height - h + 1, (), generator=generator))
            break
    else:  # an image much longer than it is wide has no such part: take its middle
        w = h = min(image.width, image.height)
        left, top = (image.width - w) // 2, (image.height - h) // 2
    image = image.resize((width, height), Image.Resampling.BICUBIC, box=(left, top, left + w, top + h))
    return ImageOps.mirror(image) if float(torch.rand((), generator=generator)) < 0.5 else image
