"""
Answers from a graph that `export_onnx` wrote, with onnxruntime, NumPy and Pillow alone: no torch, no peft_luca.

    python examples/onnx_predict.py model.onnx photo.png another.jpg
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def read_image(path, about):
    """An image file → pixel values, (channels, height, width), as the trainer made them from images of 8 bits."""
    facts, image = about["processor"], ImageOps.exif_transpose(Image.open(path))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, about["background"]), image.convert("RGBA"))
    image = image.convert("RGB")
    if about["channels"] == 1:
        image = image.convert("L")
    if facts.get("do_resize"):
        size, scale = facts["size"], facts["size"].get("shortest_edge", 0) / min(image.size)
        width, height = (max(int(side * scale), size.get("shortest_edge", 0)) for side in image.size)
        image = image.resize((size.get("width", width), size.get("height", height)), facts["resample"])
    if facts.get("do_center_crop"):
        height, width = facts["crop_size"]["height"], facts["crop_size"]["width"]
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    pixels = np.atleast_3d(np.asarray(image, np.float32)) * (facts["rescale_factor"] if facts.get("do_rescale") else 1)
    if facts.get("do_normalize"):
        pixels = (pixels - np.float32(facts["image_mean"])) / np.float32(facts["image_std"])
    return pixels.transpose(2, 0, 1).astype(np.float32)


def main():
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["peft_luca"])
    for path in sys.argv[2:]:
        logits, expert, known, unknown = session.run(None, {"pixel_values": read_image(path, about)[None]})
        probabilities = np.exp(logits[0] - logits[0].max())
        probabilities /= probabilities.sum()
        best = int(probabilities.argmax())
        answer = {"image": path, "label": about["classes"][best], "probability": float(probabilities[best])}
        answer |= {"expert": about["experts"][int(expert[0])], "known": float(known[0]), "unknown": bool(unknown[0])}
        print(json.dumps(answer, ensure_ascii=False))


if __name__ == "__main__":
    main()
