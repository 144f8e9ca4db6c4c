"""Made the files beside it by `python make.py` in this folder, with the versions that made.txt names. It shows what is
in them: later versions must read the files, and need not run this."""

from importlib.metadata import version
from pathlib import Path

import torch
from peft import get_peft_model
from safetensors.torch import save_file
from transformers import ViTConfig, ViTForImageClassification

from peft_luca import LucaConfig, __version__, save_expert, save_experts


CLASSES = {"zeta": ["a", "b"], "alpha": ["c", "d", "a"]}  # the class "a" is in both


def make_backbone():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_labels=2,
    )  # fmt: skip
    model = ViTForImageClassification(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("vit.") and parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def make_experts(classes, **settings):
    """Experts with random weights, their reference, and statistics of random features."""
    model = ViTForImageClassification.from_pretrained("backbone").eval()
    for name, names in classes.items():
        config = LucaConfig(classes=names, reduction=4, **settings)
        if hasattr(model, "peft_config"):
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if "luca_scale" in name:
                tensor.uniform_(5.0, 15.0, generator=generator)
            elif "luca_" in name and "reference" not in name:
                tensor.normal_(0.0, 0.5, generator=generator)
    for name in classes:
        model.compute_reference(name)
    return model.eval()


def collect(model):
    for name, classes in model.experts.items():
        features = model.pooled_features(torch.randn(30, 3, 8, 8, generator=torch.Generator().manual_seed(len(name))))
        model.collect_statistics(name, features, torch.arange(30) % len(classes), rank=4)


@torch.no_grad()
def main(folder):
    make_backbone().save_pretrained(folder / "backbone")
    pixel_values = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    expected = {"pixel_values": pixel_values}

    model = make_experts(CLASSES)
    for name in CLASSES:
        model.set_adapter(name)
        expected[f"entropy/{name}"] = model(pixel_values).logits
    model.set_router("entropy", temperature=2.0)
    expected["entropy"] = model(pixel_values).logits
    save_experts(model, folder / "entropy")
    save_expert(model, "alpha", folder / "single")
    expected["single"] = expected["entropy/alpha"]

    collect(model)
    for router, options in {"gaussian": {"temperature": 2.0, "unknown_below": 0.25}, "prototype": {}}.items():
        model.set_router(router, **options)
        expected[router] = model(pixel_values).logits
        save_experts(model, folder / router)
    model.set_router("hybrid", candidates=1)
    save_experts(model, folder / "hybrid")

    save_expert(make_experts({"t": ["a", "b"]}, head="linear"), "t", folder / "linear")
    save_file({name: tensor.clone() for name, tensor in expected.items()}, folder / "expected.safetensors")
    versions = [f"{package} {version(package)}" for package in ("peft", "transformers", "torch", "safetensors")]
    made = "\n".join([f"peft_luca {__version__}", *versions])
    (folder / "made.txt").write_text(f"{made}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path())
