"""Images as users have them: every kind is seen as a person sees it, or is named as one that cannot be read."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from helpers import make_processor, make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PilImage
from PIL.PngImagePlugin import PngInfo
from transformers.image_utils import load_image

from peft_luca import ImageCollator, TaskStream
from peft_luca.preprocessing import to_rgb


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


SEEN_AS_THE_RAMP = {
    "grey": GREY,
    "grey with alpha": alpha("LA", 128),
    "grey, transparent": alpha("LA", 0),
    "grey multiplied by alpha": alpha("LA", 255).convert("La"),
    "RGB": GREY.convert("RGB"),
    "RGBA, transparent": alpha("RGBA", 0),
    "RGBA multiplied by alpha": alpha("RGBA", 255).convert("RGBa"),
    "palette": GREY.convert("P"),
    "palette with transparencies": saved(GREY.convert("P"), "png", transparency=bytes(range(256))),
    "palette with alpha": GREY.convert("LA").convert("PA"),
    "CMYK": GREY.convert("RGB").convert("CMYK"),
    "CMYK in a JPEG of Adobe's": saved(GREY.convert("RGB").convert("CMYK"), "jpeg", quality=100),
    "CMYK in a JPEG of nobody's": without_adobe(saved(GREY.convert("RGB").convert("CMYK"), "jpeg", quality=100)),
    "YCbCr": GREY.convert("RGB").convert("YCbCr"),
    "several views": saved(GREY, "mpo", save_all=True, append_images=[GREY.transpose(0)], quality=100),
    "HSV": GREY.convert("RGB").convert("HSV"),
    "16 bits": sixteen(),
    "16 bits in a PNG": saved(sixteen(), "png"),
    "16 bits in a PNG, with alpha": png_of_sixteen_bits(4, 2),
    "16 bits in a PNG, in colour": png_of_sixteen_bits(2, 3),
    "16 bits in a PNG, in colour with alpha": png_of_sixteen_bits(6, 4),
    "16 bits in a TIFF": saved(sixteen(), "tiff"),
    "16 bits, the other way round": PilImage.frombytes("I;16B", GREY.size, sixteen(">").tobytes()),
    "16 bits in 32": PilImage.fromarray((RAMP * 65535).round().astype(np.int32)),
    "8 bits in 32": PilImage.fromarray(GREYS.astype(np.int32)),
    "32 bits": PilImage.fromarray((RAMP * (2**31 - 1)).astype(np.int32)),
    "floats to 1": PilImage.fromarray(RAMP.astype(np.float32)),
    "floats to 1 in a TIFF": saved(PilImage.fromarray(RAMP.astype(np.float32)), "tiff"),
    "floats of whole numbers to 255": PilImage.fromarray(GREYS.astype(np.float32)),
    "HDR floats": PilImage.fromarray((RAMP * 37.5).astype(np.float32)),
}


@pytest.mark.parametrize("kind", SEEN_AS_THE_RAMP)
def test_every_kind_is_seen_as_it_looks(kind):
    rgb = to_rgb(SEEN_AS_THE_RAMP[kind])
    assert (rgb.mode, rgb.size) == ("RGB", (10, 6))
    np.testing.assert_allclose(np.asarray(rgb).astype(int), np.repeat(GREYS[..., None], 3, 2).astype(int), atol=2)


def test_eight_bits_are_kept_to_the_bit():
    assert np.array_equal(np.asarray(to_rgb(GREY))[..., 1], GREYS)
    for integers in (np.int32, np.float32):
        assert np.array_equal(np.asarray(to_rgb(PilImage.fromarray(GREYS.astype(integers))))[..., 2], GREYS)


def test_one_bit_and_transparent_palettes():
    assert sorted({color for _, color in to_rgb(GREY.convert("1", dither=0)).getcolors()}) == [(0,) * 3, (255,) * 3]
    image = PilImage.new("P", (2, 2))
    image.putpalette([200, 10, 30])
    for transparency in (0, bytes([0])):
        image.info["transparency"] = transparency
        assert to_rgb(image).getpixel((0, 0)) == (200, 10, 30)


def test_numbers_that_are_none():
    values = RAMP.astype(np.float32)
    values[0, :4] = np.nan, np.inf, -np.inf, -3.0
    assert np.asarray(to_rgb(PilImage.fromarray(values)))[0, :4, 0].tolist() == [0, 255, 0, 0]
    nothing = PilImage.fromarray(np.full((2, 2), np.nan, np.float32))
    assert to_rgb(nothing).getcolors() == [(4, (0, 0, 0))]


# --- EXIF and XMP ---


def turned(how):
    exif = PilImage.Exif()
    exif[0x0112] = how
    return exif


@pytest.mark.parametrize("how", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "tiff", "webp"])
def test_rotation_is_the_same_from_a_dataset_and_from_a_path(tmp_path, how, kind):
    corner = np.zeros((6, 10, 3), np.uint8)
    corner[:3, :5] = 200
    encoded = saved(PilImage.fromarray(corner), kind, exif=turned(how), **({"quality": 100} if kind == "jpeg" else {}))
    path = tmp_path / f"image.{kind}"
    path.write_bytes(encoded["bytes"])
    expected = load_image(str(path))  # as a pipeline reads it
    assert expected.size == ((10, 6) if how < 5 else (6, 10))
    decoded = Image().decode_example(encoded)  # as a dataset's row gives it
    for image in (encoded, {"bytes": None, "path": str(path)}, decoded, PilImage.open(path)):
        assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(expected))


LITTLE = b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00"
BIG = b"Exif\x00\x00MM\x00*\x00\x00\x00\x08"
BROKEN_EXIF = {
    "an orientation that there is not": turned(9),
    "an orientation of text": LITTLE + b"\x12\x01\x02\x00\x04\x00\x00\x00up\x00\x00" + bytes(4),
    "cut off": b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff\x12\x01\x03\x00" + b"\xff" * 40,
    "no EXIF at all": b"Exif\x00\x00junkjunkjunk",
    "one byte": b"Exif\x00\x00I",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("exif", BROKEN_EXIF.values(), ids=BROKEN_EXIF)
@pytest.mark.filterwarnings("ignore:.*EXIF.*:UserWarning", "ignore:.*Tag data.*:UserWarning")
def test_broken_exif_stops_nothing(exif):
    assert to_rgb(saved(GREY.convert("RGB"), "jpeg", exif=exif)).size == (10, 6)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_exif_stops_anything(content):
    for head in (
        b"Exif\x00\x00",
        b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00\x12\x01",
        b"Exif\x00\x00MM\x00*\x00\x00\x00\x08",
    ):
        assert sorted(to_rgb(saved(GREY, "jpeg", exif=head + content)).size) == [6, 10]


@pytest.mark.parametrize("how", [1, 3, 6])
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_rotation_may_be_said_in_xmp(tmp_path, how, kind):
    xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{how}"/></x:xmpmeta>'
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp)
    options = {"pnginfo": text} if kind == "png" else {"xmp": xmp.encode()}
    encoded = saved(GREY.convert("RGB"), kind, **options)
    (tmp_path / "image").write_bytes(encoded["bytes"])
    expected = load_image(str(tmp_path / "image"))
    assert expected.size == ((6, 10) if how == 6 else (10, 6))
    for image in (encoded, {"bytes": None, "path": str(tmp_path / "image")}, Image().decode_example(encoded)):
        assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(expected))


@pytest.mark.parametrize("mode", ["1", "P", "LA", "I;16", "I", "F", "CMYK"])
def test_rotation_of_every_mode(mode):
    image = PilImage.new(mode, (10, 6))
    image.getexif()[0x0112] = 6
    assert to_rgb(image).size == (6, 10)


@pytest.mark.parametrize("xmp", [b"<broken", b"\xff\xfe\x00", b"<x:xmpmeta tiff:Orientation='no'/>", b"", b"<" * 9999])
def test_broken_xmp_stops_nothing(xmp):
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp.decode("latin1"))
    for image in (saved(GREY, "jpeg", xmp=xmp), saved(GREY, "webp", xmp=xmp), saved(GREY, "png", pnginfo=text)):
        assert to_rgb(image).size == (10, 6)


def test_what_a_parser_raises_is_no_ones_concern():
    image = GREY.copy()
    image.getexif = lambda: 1 / 0
    assert to_rgb(image).size == (10, 6)


# --- what cannot be read ---


def noise(side=64):
    return PilImage.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


WHOLE = saved(noise(), "jpeg")["bytes"]
UNREADABLE = {
    "nothing": b"",
    "one byte": b"\xff",
    "a JPEG's first header": WHOLE[:100],
    "a JPEG without its last byte": WHOLE[:-1],
    "no image": b"<html>not found</html>",
    "half a JPEG": WHOLE[: len(WHOLE) // 2],
    "half a PNG": saved(noise(), "png")["bytes"][:3000],
    "a PNG of half a pixel": saved(GREY, "png")["bytes"][:45],
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_named_or_left_out(tmp_path, content):
    rows = [saved(noise(), "png"), {"bytes": content, "path": "photos/7.jpg"}, saved(GREY, "png")]
    features = Features(image=Image(), label=Value("string"))
    stream = TaskStream.from_dataset(Dataset.from_dict({"image": rows, "label": ["a"] * 3}, features))
    with pytest.raises(ValueError, match=r"image in row 1 \(photos/7\.jpg\) cannot be read: .* on_bad_image='skip'"):
        make_trainer(tmp_path / "raise", stream).train()
    trainer = make_trainer(tmp_path / "skip", stream, on_bad_image="skip", num_train_epochs=1)
    trainer.train()
    assert trainer.results()["tasks"][0]["skipped_images"] == 1
    with pytest.raises(ValueError, match=r"the image photos/7\.jpg cannot be read: "):
        trainer.evaluate(stream[0].train)


def test_six_hundred_megapixels_are_refused_before_they_are_in_memory():
    compress = zlib.compressobj(9)
    rows = b"".join(compress.compress(bytes(30_001)) for _ in range(20_000)) + compress.flush()
    image = png(30_000, 20_000, 8, 0, rows)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"600000000 pixels\) exceeds limit .*set PIL\.Image\.MAX_IMAGE_PIXELS"):
        to_rgb(image)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_a_limit_that_the_user_lifts_is_lifted(monkeypatch):
    monkeypatch.setattr(PilImage, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match="60 pixels"):
        to_rgb(saved(GREY, "png"))
    monkeypatch.setattr(PilImage, "MAX_IMAGE_PIXELS", None)
    assert to_rgb(saved(GREY, "png")).size == (10, 6)


@pytest.mark.parametrize("image", [None, np.zeros((2, 2, 3)), "1.png"])
def test_what_is_no_image_is_told(image):
    with pytest.raises(
        TypeError, match=rf"found a {type(image).__name__}; needed a PIL image, or its bytes or path in a dict"
    ):
        to_rgb(image)


def test_images_that_are_nowhere():
    with pytest.raises(FileNotFoundError, match="neither content nor a file"):
        to_rgb({"bytes": None, "path": None})


# --- odd shapes ---


@pytest.mark.parametrize("kind", ["gif", "webp", "png", "tiff"])
def test_of_an_animation_the_first_frame(kind):
    frames = [PilImage.new("RGB", (4, 4), color) for color in ("red", "blue", "green")]
    encoded = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    assert to_rgb(encoded).getpixel((0, 0))[0] > 250
    decoded = PilImage.open(io.BytesIO(encoded["bytes"]))
    assert decoded.n_frames == 3
    assert to_rgb(decoded).getpixel((0, 0))[0] > 250


def test_a_first_frame_that_is_a_part_of_the_picture():
    """It lies on the animation's ground, as in every viewer, and the second one not on it yet."""

    def frame(left, top, side, colour):
        codes = [4, *[code for _ in range(side * side) for code in (colour, 4)], 5]  # of three bits; 4 begins anew
        bits = sum(code << (3 * i) for i, code in enumerate(codes))
        data = bits.to_bytes(-(-3 * len(codes) // 8), "little")
        return struct.pack("<BHHHHBBB", 0x2C, left, top, side, side, 0, 2, len(data)) + data + b"\0"

    colours = bytes([10, 20, 30, 250, 0, 0, 0, 250, 0, 0, 0, 0])
    content = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x91, 0, 0) + colours
    content += frame(2, 3, 3, 1) + frame(0, 0, 2, 2) + b";"
    image = to_rgb({"bytes": content, "path": None})
    assert image.size == (8, 8)
    assert dict(map(reversed, image.getcolors())) == {(10, 20, 30): 55, (250, 0, 0): 9}
    assert image.getpixel((2, 3)) == (250, 0, 0)


@pytest.mark.parametrize("size", [(1, 1), (1, 400), (400, 1), (1, 9000)])
@pytest.mark.parametrize("augmentation", [False, True])
def test_one_pixel_wide(size, augmentation):
    rows = [{"image": saved(PilImage.new("RGB", size, "red"), "png")}]
    pixels = ImageCollator(make_processor(), "image", augmentation=augmentation)(rows)["pixel_values"]
    assert pixels.shape == (1, 3, 16, 16)
    assert torch.allclose(pixels[0, 0], torch.ones(16, 16), atol=0.02)


def test_a_mode_that_is_asked_for_is_refused():
    data = Dataset.from_dict({"image": [GREY], "label": ["a"]}, Features(image=Image(mode="L"), label=Value("string")))
    with pytest.raises(ValueError, match=r"asks for images of the mode 'L', but all are brought to RGB"):
        TaskStream.from_dataset(data)
