"""Images of any kind become upright 8-bit RGB, bad ones are named, and processor and backbone are checked."""

import io
import os
import struct
import threading
import tracemalloc
import zipfile
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from datasets import Image
from helpers import SIDE, make_images, make_processor, make_trainer, make_vit
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from PIL import Image as PilImage
from PIL import ImageColor
from PIL.PngImagePlugin import PngInfo
from transformers import BitImageProcessorPil, DeiTImageProcessorPil, ViTImageProcessorPil
from transformers.image_utils import load_image

from peft_luca.preprocessing import (
    MissingSourceError,
    channels_of,
    image_size,
    process,
    random_crop_and_flip,
    read_bytes,
    read_image,
    undecoded,
)


RAMP = np.tile(np.linspace(0, 1, 10), (6, 1))  # black to white, ten wide and six high
GREYS = (RAMP * 255).round().astype(np.uint8)
GREY = PilImage.fromarray(GREYS)


def saved(image, kind, **options):
    """An image as a dataset keeps it, encoded."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return {"bytes": buffer.getvalue(), "path": None}


def alpha(mode, level):
    return PilImage.merge(mode, [*[GREY] * (len(mode) - 1), PilImage.new("L", GREY.size, level)])


def sixteen(order="<"):
    return PilImage.fromarray((RAMP * 65535).round().astype(f"{order}u2"))


def without_adobe(image):
    """A JPEG without the marker that says whether its CMYK is inverted."""
    content = image["bytes"]
    start = content.index(b"Adobe") - 4
    length = int.from_bytes(content[start + 2 : start + 4], "big")
    return {"bytes": content[:start] + content[start + 2 + length :], "path": None}


def png_of_sixteen_bits(color, channels):
    """What Pillow reads and does not write: the ramp in every channel, which hides none of it as alpha."""
    rows = np.repeat((RAMP * 65535).round().astype(">u2")[..., None], channels, axis=2)
    return png(10, 6, 16, color, zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))


def png(width, height, bits, color, rows):
    """A PNG of compressed rows."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return {"bytes": b"\x89PNG\r\n\x1a\n" + content, "path": None}


KINDS_OF_THE_RAMP = {
    "grey": GREY,
    "opaque, with alpha": alpha("RGBA", 255),
    "RGB": GREY.convert("RGB"),
    "RGBA multiplied by alpha": alpha("RGBA", 255).convert("RGBa"),
    "palette": GREY.convert("P"),
    "palette with alpha": GREY.convert("LA").convert("PA"),
    "CMYK": GREY.convert("RGB").convert("CMYK"),
    "CMYK in a JPEG of Adobe's": saved(GREY.convert("RGB").convert("CMYK"), "jpeg", quality=100),
    "CMYK in a JPEG of nobody's": without_adobe(saved(GREY.convert("RGB").convert("CMYK"), "jpeg", quality=100)),
    "YCbCr": GREY.convert("RGB").convert("YCbCr"),
    "several views": saved(GREY, "mpo", save_all=True, append_images=[GREY.transpose(0)], quality=100),
    "HSV": GREY.convert("RGB").convert("HSV"),
    "16 bits": sixteen(),
    "16 bits in a PNG": saved(sixteen(), "png"),
    "16 bits in a PNG, in colour": png_of_sixteen_bits(2, 3),
    "16 bits in a TIFF": saved(sixteen(), "tiff"),
    "16 bits, the other way round": PilImage.frombytes("I;16B", GREY.size, sixteen(">").tobytes()),
    "16 bits in 32": PilImage.fromarray((RAMP * 65535).round().astype(np.int32)),
    "floats": PilImage.fromarray(RAMP.astype(np.float32)),
    "floats in a TIFF": saved(PilImage.fromarray(RAMP.astype(np.float32)), "tiff"),
    "an array": GREYS,
    "an array of 16 bits": np.asarray(sixteen()),
    "an array of floats": RAMP,
}


def assert_is_the_ramp(rgb):
    assert (rgb.mode, rgb.size) == ("RGB", (10, 6))
    np.testing.assert_allclose(np.asarray(rgb).astype(int), np.repeat(GREYS[..., None], 3, 2).astype(int), atol=2)


@pytest.mark.parametrize("kind", KINDS_OF_THE_RAMP)
def test_every_kind_of_image_looks_the_same_in_rgb(kind):
    assert_is_the_ramp(read_image(KINDS_OF_THE_RAMP[kind]))


@pytest.mark.parametrize(
    ("values", "white"),
    [
        (GREYS.astype(np.int32), 255),
        ((RAMP * 4095).round().astype(np.uint16), 4095),
        ((RAMP * (2**31 - 1)).astype(np.int32), 2**31 - 1),
        (GREYS.astype(np.float32), 255),
        ((RAMP * 37.5).astype(np.float32), 37.5),
    ],
)
def test_another_white_is_said(values, white):
    assert_is_the_ramp(read_image(PilImage.fromarray(values), white_level=white))


def test_white_is_that_of_the_type_and_not_of_an_image():
    for kind, white in ((np.uint16, 65535), (np.int32, 65535), (np.float32, 1)):
        greys = []
        for brightest in (0.4, 0.999, 1.0, 1.5 if kind != np.uint16 else 1.0):
            values = np.full((4, 4), 0.4 * white).astype(kind)
            values[0, 0] = kind(brightest * white)
            greys.append(read_image(PilImage.fromarray(values)).getpixel((2, 2)))
        assert greys == [(102, 102, 102)] * 4


def test_values_of_another_range_are_refused_or_said_aloud():
    for values in (GREYS.astype(np.float32), (RAMP * 1e6).astype(np.int32)):
        with pytest.raises(
            ValueError, match=r"its values go up to .*, but white is .*LucaConfig\(white_level=\.\.\.\)"
        ):
            read_image(PilImage.fromarray(values))
    for values in ((RAMP * 4095).astype(np.uint16), GREYS.astype(np.int32)):
        with pytest.warns(UserWarning, match=r"no value above 4095.* LucaConfig\(white_level=\.\.\.\)") as said:
            read_image(PilImage.fromarray(values))
        assert len(said) == 1


# --- alpha ---

TRANSPARENT = {
    "grey": (alpha("LA", 64), 64 / 255),
    "colour": (alpha("RGBA", 64), 64 / 255),
    "invisible": (alpha("RGBA", 0), 0),
    "in a file": (saved(alpha("RGBA", 64), "png"), 64 / 255),
    "palette": (saved(GREY.convert("P"), "png", transparency=bytes([64] * 256)), 64 / 255),
    "16 bits, alpha as grey": (png_of_sixteen_bits(4, 2), RAMP),
    "16 bits in colour, alpha as grey": (png_of_sixteen_bits(6, 4), RAMP),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
@pytest.mark.parametrize("background", ["white", "black", "#ff8000"])
def test_what_is_transparent_shows_the_background(kind, background):
    image, opacity = TRANSPARENT[kind]
    ground = np.array(ImageColor.getrgb(background)) * np.ones((6, 10, 1))
    shown = np.broadcast_to(opacity, (6, 10))[..., None]
    rgb = read_image(image, background=background)
    np.testing.assert_allclose(np.asarray(rgb), shown * GREYS[..., None] + (1 - shown) * ground, atol=3)
    grey = read_image(image, channels=1, background=background)
    assert np.array_equal(np.asarray(grey), np.asarray(rgb.convert("L")))


def test_hidden_colours_of_invisible_pixels_are_not_seen():
    """As in emoji and icons, whose hidden colours differ from class to class."""
    for transparency in (0, bytes([0])):
        one, other = PilImage.new("P", (2, 2)), PilImage.new("P", (2, 2))
        for image, palette in ((one, [200, 10, 30]), (other, [0, 0, 0])):
            image.putpalette(palette)
            image.info["transparency"] = transparency
        assert read_image(one).getcolors() == read_image(other).getcolors() == [(4, (255, 255, 255))]
    deep = png_of_sixteen_bits(0, 1)["bytes"]
    start = deep.index(b"IDAT") - 4
    key = b"\0\0\0\2tRNS\0\0" + struct.pack(">I", zlib.crc32(b"tRNS\0\0"))  # black is transparent
    deep = {"bytes": deep[:start] + key + deep[start:], "path": None}
    assert read_image(deep).getpixel((0, 0)) == read_image(deep).getpixel((9, 0)) == (255, 255, 255)
    assert read_image(deep, background="red").getpixel((0, 0)) == (255, 0, 0)
    keyed = saved(GREY.convert("RGB"), "png", transparency=(0, 0, 0))  # one colour of a PNG is transparent
    assert read_image(keyed, background="red").getpixel((0, 0)) == (255, 0, 0)
    assert read_image(keyed).getpixel((9, 0)) == (255, 255, 255)


# --- numbers ---


def test_eight_bits_are_kept_exactly():
    for image in (GREY, alpha("LA", 255), alpha("RGBA", 255)):
        assert np.array_equal(np.asarray(read_image(image))[..., 1], GREYS)


def test_one_bit():
    image = read_image(GREY.convert("1", dither=0))
    assert sorted({color for _, color in image.getcolors()}) == [(0,) * 3, (255,) * 3]


def test_numbers_that_are_not_finite_or_negative():
    values = RAMP.astype(np.float32)
    values[0, :4] = np.nan, np.inf, -np.inf, -3.0
    assert np.asarray(read_image(PilImage.fromarray(values)))[0, :4, 0].tolist() == [0, 255, 0, 0]
    nothing = PilImage.fromarray(np.full((2, 2), np.nan, np.float32))
    assert read_image(nothing).getcolors() == [(4, (0, 0, 0))]


# --- orientation ---


def exif_of(orientation):
    exif = PilImage.Exif()
    exif[0x0112] = orientation
    return exif


def xmp_of(orientation):
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'


def with_xmp(image, kind, xmp):
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp)
    return saved(image, kind, **({"pnginfo": text} if kind == "png" else {"xmp": xmp.encode("latin1")}))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "tiff", "webp", "xmp in jpeg", "xmp in png", "xmp in webp"])
def test_the_orientation_is_applied_once_however_an_image_is_read(tmp_path, orientation, kind):
    corner = np.zeros((6, 10, 3), np.uint8)
    corner[:3, :5] = 200
    image, name = PilImage.fromarray(corner), kind.split()[-1]
    if kind.startswith("xmp"):
        encoded = with_xmp(image, name, xmp_of(orientation))
    else:
        encoded = saved(image, name, exif=exif_of(orientation), **({"quality": 100} if name == "jpeg" else {}))
    path = tmp_path / f"image.{name}"
    path.write_bytes(encoded["bytes"])
    expected = load_image(str(path))  # as a pipeline reads it
    assert expected.size == ((10, 6) if orientation < 5 else (6, 10))
    decoded = Image().decode_example(encoded)  # as a row of a dataset has it
    for image in (encoded, {"path": str(path), "bytes": None}, decoded, PilImage.open(path), read_image(encoded)):
        assert np.array_equal(np.asarray(read_image(image)), np.asarray(expected))


BROKEN_EXIF = [
    exif_of(9),
    b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00\x12\x01\x02\x00\x04\x00\x00\x00up" + bytes(6),
    b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff\x12\x01\x03\x00" + b"\xff" * 40,
    b"Exif\x00\x00junkjunkjunk",
]


@pytest.mark.filterwarnings("ignore:.*EXIF.*:UserWarning", "ignore:.*Tag data.*:UserWarning")
def test_broken_exif_and_xmp_are_ignored():
    for exif in BROKEN_EXIF:
        assert read_image(saved(GREY.convert("RGB"), "jpeg", exif=exif)).size == (10, 6)
    for kind in ("jpeg", "webp", "png"):
        for xmp in ("<broken", "\xff\xfe\x00", "<x:xmpmeta tiff:Orientation='no'/>", "<" * 9999):
            assert read_image(with_xmp(GREY, kind, xmp)).size == (10, 6)


# --- animations and limits ---


@pytest.mark.parametrize("kind", ["gif", "webp", "png", "tiff"])
def test_the_first_frame_of_an_animation(kind):
    frames = [PilImage.new("RGB", (4, 4), color) for color in ("red", "blue", "green")]
    encoded = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    assert read_image(encoded).getpixel((0, 0))[0] > 250


def test_a_huge_image_is_refused_before_it_is_in_memory():
    compress = zlib.compressobj(1)
    rows = b"".join(compress.compress(bytes(30_001)) for _ in range(100)) + compress.flush()
    image = png(30_000, 20_000, 8, 0, rows)
    tracemalloc.start()
    with pytest.raises(PilImage.DecompressionBombError, match=r"600000000 pixels\) exceeds limit"):
        read_image(image)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_the_limit_of_pixels_is_that_of_pillow(monkeypatch):
    monkeypatch.setattr(PilImage, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(PilImage.DecompressionBombError, match="60 pixels"):
        read_image(saved(GREY, "png"))
    monkeypatch.setattr(PilImage, "MAX_IMAGE_PIXELS", None)
    assert read_image(saved(GREY, "png")).size == (10, 6)


# --- images that cannot be read ---


def noise(side=64):
    return PilImage.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_a_broken_image_raises(kind):
    whole = saved(noise(), kind)["bytes"]
    for content in (b"", whole[:100], whole[: len(whole) // 2], b"<html>not found</html>"):
        with pytest.raises((OSError, ValueError, SyntaxError)):
            read_image({"bytes": content, "path": f"7.{kind}"})


def test_what_is_no_image_is_a_type_error():
    with pytest.raises(TypeError, match="found a Tensor; needed a PIL image, an array, a path, or bytes in a dict"):
        read_image(torch.zeros(2, 2, 3))
    with pytest.raises(FileNotFoundError, match="neither bytes nor a path"):
        read_image({"bytes": None, "path": None})


def test_undecoded_leaves_other_datasets_alone():
    data = make_images(["red"], 1)
    assert isinstance(undecoded(data, "image")[0]["image"], dict)
    assert undecoded(data, "label") is data
    assert undecoded([1], "image") == [1]


# --- one missing file, or a missing source ---


def assert_missing(path, source, match=None):
    """Reading a path tells whether its source is missing, or only this file."""
    with pytest.raises(MissingSourceError if source else FileNotFoundError, match=match) as error:
        read_bytes({"path": str(path), "bytes": None})
    assert isinstance(error.value, MissingSourceError) == source


def test_a_file_or_its_folder_may_be_missing(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    assert_missing(tmp_path / "b" / "1.png", True, "its folder does not exist")
    assert_missing(tmp_path / "a" / "1.png", True, "its folder is empty.* No image was skipped")
    (tmp_path / "a" / ".Trash").touch()  # a desktop leaves it where a disk was
    assert_missing(tmp_path / "a" / "1.png", True, "its folder is empty")
    (tmp_path / "a" / "2.png").touch()
    assert_missing(tmp_path / "a" / "1.png", False)
    assert_missing(f"file://{tmp_path}/a/1.png", False)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    assert_missing(tmp_path / "a" / "1.png", True, "Permission denied")


def test_an_archive_may_be_missing(tmp_path):
    image = f"zip://1.png::{tmp_path}/images.zip"
    assert_missing(image, True, r"images\.zip cannot be read: its archive does not exist")
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("2.png", b"two")
    assert_missing(image, False)
    assert read_bytes({"path": image.replace("1.png", "2.png"), "bytes": None}) == b"two"


@pytest.mark.parametrize(("status", "source"), [(404, False), (410, False), (403, True), (503, True), (None, True)])
def test_a_server_may_be_missing(monkeypatch, status, source):
    """fsspec raises FileNotFoundError whatever a server answers, and if there is none."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert_missing(f"http://127.0.0.1:{server.server_port if status else 1}/1.png", source)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("cause", "source"),
    [(None, False), (EntryNotFoundError, False), (RepositoryNotFoundError, True), (RevisionNotFoundError, True)],
)
def test_a_repository_may_be_missing(monkeypatch, cause, source):
    def fail(*args, **kwargs):
        response = {"response": SimpleNamespace(headers={}, request=None)} if source else {}
        raise FileNotFoundError(args[0]) from (cause and cause("missing", **response))

    monkeypatch.setattr(datasets.utils.file_utils, "xopen", fail)
    assert_missing("hf://datasets/me/images/1.png", source)


@pytest.mark.parametrize(
    ("error", "expected"), [(OSError(), MissingSourceError), (MemoryError(), MemoryError), (ValueError(), ValueError)]
)
def test_other_errors_of_reading(monkeypatch, error, expected):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets.utils.file_utils, "xopen", fail)
    with pytest.raises(expected):
        read_bytes({"path": "images/1.png", "bytes": None})


# --- processors ---


@pytest.mark.parametrize(
    ("channels", "options", "message"),
    [
        (3, {"size": {"height": 20, "width": 20}}, r"\(20\*20\) doesn't match model \(16\*16\)"),
        (1, {}, "mean must have 1 elements .* got 3"),
        (1, {"do_convert_rgb": True}, "Expected 1 but got 3"),
    ],
)
def test_a_backbone_refuses_what_another_processor_makes_before_anything_is_trained(
    tmp_path, channels, options, message
):
    options = {"size": {"height": SIDE, "width": SIDE}, **options}
    model = make_vit(num_channels=channels)
    trainer = make_trainer(tmp_path, model=model, processor=ViTImageProcessorPil(**options))
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_channels_of_a_backbone():
    assert [channels_of(model) for model in (make_vit(num_channels=1), torch.nn.Linear(1, 1))] == [1, 3]
    with pytest.raises(ValueError, match=r"only backbones of 3 or 1 channels are supported, .* num_channels=4"):
        make_trainer("unused", model=make_vit(num_channels=4))


def test_the_size_of_a_processor():
    assert image_size(make_processor()) == (SIDE, SIDE)
    cropping = SimpleNamespace(crop_size={"height": 5, "width": 7}, size={"shortest_edge": 9})
    assert image_size(cropping) == (5, 7)
    cropping.crop_size = None
    assert image_size(cropping) == (9, 9)
    with pytest.raises(ValueError, match="with crop_size or size, found size=None"):
        image_size(object())


# --- augmentation ---


def test_a_crop_has_the_asked_size_whatever_the_image():
    torch.manual_seed(0)
    for size in ((30, 20), (400, 3), (3, 400), (1, 1)):
        crops = {random_crop_and_flip(PilImage.new("RGB", size), 8, 12).size for _ in range(10)}
        assert crops == {(12, 8)}


def test_crops_have_the_areas_and_ratios_of_the_paper():
    side = 200
    ramp = np.zeros((side, side, 3), np.uint8)  # each pixel says where it was
    ramp[..., 0] = np.linspace(0, 255, side)[None]
    ramp[..., 1] = np.linspace(0, 255, side)[:, None]
    torch.manual_seed(0)
    areas, ratios, flips = [], [], []
    for _ in range(300):
        crop = np.asarray(random_crop_and_flip(PilImage.fromarray(ramp), 32, 32)).astype(float)
        width = abs(crop[16, -1, 0] - crop[16, 0, 0]) / 255 * 32 / 31
        height = abs(crop[-1, 16, 1] - crop[0, 16, 1]) / 255 * 32 / 31
        areas.append(width * height)
        ratios.append(width / height)
        flips.append(crop[16, 0, 0] > crop[16, -1, 0])
    assert 0.04 < min(areas) < 0.12
    assert 0.85 < max(areas) < 1.1
    assert 0.65 < min(ratios) < 0.9
    assert 1.1 < max(ratios) < 1.5
    assert 0.4 < np.mean(flips) < 0.6


# --- a stock image processor of Pillow ---


class Darker(ViTImageProcessorPil):
    def normalize(self, image, mean, std, **kwargs):
        return super().normalize(image, mean, std, **kwargs) - 1


class Centred(ViTImageProcessorPil):
    def rescale(self, image, scale, **kwargs):
        return super().rescale(image - image.mean(), scale, **kwargs)


SIZES = {"height": 20, "width": 31}


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessorPil(size=SIZES),
        ViTImageProcessorPil(size=SIZES, resample=3, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]),
        ViTImageProcessorPil(size=SIZES, resample=0, do_normalize=False),
        ViTImageProcessorPil(size=SIZES, do_rescale=False),
        ViTImageProcessorPil(do_resize=False),
        DeiTImageProcessorPil(size=SIZES, crop_size={"height": 16, "width": 16}),
        BitImageProcessorPil(size={"shortest_edge": 20}, crop_size=SIZES),
        Darker(size=SIZES),
        Centred(size=SIZES),
    ],
    ids=lambda processor: f"{type(processor).__name__}{processor.resample}",
)
def test_pixels_are_those_of_the_image_processor_to_the_bit(processor):
    rng = np.random.default_rng(0)
    pictures = [PilImage.fromarray(rng.integers(0, 256, (40, 57, 3), dtype=np.uint8)) for _ in range(3)]
    for images in (pictures, [image.convert("L").convert("RGB") for image in pictures]):
        expected = processor(images=images, return_tensors="pt")["pixel_values"]
        found = process(images, processor)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
