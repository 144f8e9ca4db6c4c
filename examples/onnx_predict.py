"""
Classifies images with a file of `export_onnx`, with onnxruntime, Pillow and NumPy alone.

    python examples/onnx_predict.py model.onnx image.png another.jpg
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def read(path, processor, images):
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode[0] in "IF":  # 16 bits or floats
        white = images["white_level"] or (1 if image.mode == "F" else 65535)
        image = Image.fromarray((np.asarray(image, np.float32).clip(0, white) * (255 / white)).round().astype("uint8"))
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, images["background"])
        image = Image.alpha_composite(ground, image.convert("RGBA"))
    image = image.convert("RGB").convert("RGB" if images["channels"] == 3 else "L")
    if size := processor.get("size"):
        sides = [int(size.get("shortest_edge", 0) * side / min(image.size)) for side in image.size]
        image = image.resize((size.get("width", sides[0]), size.get("height", sides[1])), processor["resample"])
    if crop := processor.get("crop_size"):
        left, top = (image.width - crop["width"]) // 2, (image.height - crop["height"]) // 2
        image = image.crop((left, top, left + crop["width"], top + crop["height"]))
    pixels = np.asarray(image, np.float32).reshape(image.height, image.width, -1) * processor.get("rescale_factor", 1)
    pixels = (pixels - processor.get("image_mean", 0)) / processor.get("image_std", 1)
    return pixels.transpose(2, 0, 1).astype("float32")


session = onnxruntime.InferenceSession(sys.argv[1])
about = json.loads(session.get_modelmeta().custom_metadata_map["peft_luca"])
for path in sys.argv[2:]:
    pixels = read(path, about["processor"], about["images"])
    logits, expert, known = session.run(None, {"pixel_values": pixels[None]})
    probabilities = np.exp(logits[0] - logits[0].max()) / np.exp(logits[0] - logits[0].max()).sum()
    label = "unknown" if known[0] < about["unknown_below"] else about["classes"][probabilities.argmax()]
    print(f"{path}: {label} {probabilities.max():.6f} (expert {about['experts'][expert[0]]})")
