"""
Where the head is and what enters it, for every image classifier that docs/backbones.md names.

The table in the docs is made from the rows below: `python tests/tuner/test_architectures.py` writes it anew.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from helpers import expert_config, logits, pictures
from peft import get_peft_model
from torch import Tensor, nn

from peft_luca import LucaConfig, LucaLayer
from peft_luca.tuner.layer import cls_of


DOCS = Path(__file__).parents[2] / "docs" / "backbones.md"

FLAT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 8,
    "patch_size": 4,
}
TEXT = {key: FLAT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
PAIR = {"vision_config": FLAT, "text_config": {**TEXT, "bos_token_id": 0, "eos_token_id": 1}}
WINDOWED = {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
CONVNEXT = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 8}
PYRAMID = {
    "image_size": 32,
    "hidden_sizes": [8, 8, 8, 16],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 1, 1],
    "mlp_ratios": [1, 1, 1, 1],
}

# What a trunk's own output says that LuCA should read, (batch, tokens, width) → (batch, width).
CLS, PATCHES, TOKENS = "[CLS]", "mean of the patches", "mean of the tokens"
READ: dict[str, Callable[[Tensor], Tensor]] = {
    CLS: lambda tokens: tokens[:, 0],
    PATCHES: lambda tokens: tokens[:, 1:].mean(dim=1),
    TOKENS: lambda tokens: tokens.mean(dim=1),
}
POOLER = "pooled vector of the trunk"


class Row(NamedTuple):
    model: str  # class in transformers, without "ForImageClassification"
    config: dict[str, Any]
    trunk: str
    reads: str
    widths: str = "h"
    note: str = ""
    size: int = 8


ROWS = [
    Row("ViT", FLAT, "vit", CLS),
    Row("ViTMSN", FLAT, "vit", CLS),
    Row("DeiT", FLAT, "deit", CLS),
    Row("Dinov2", FLAT, "dinov2", CLS, "2h", "the head reads [CLS] and the patches' mean; LuCA takes the first h"),
    Row("Dinov2WithRegisters", FLAT, "dinov2_with_registers", CLS, "2h", "as Dinov2"),
    Row("Pvt", PYRAMID, "pvt", CLS, "last stage", "", 32),
    Row("Beit", {**FLAT, "use_mean_pooling": False}, "beit", CLS, "h", "with `use_mean_pooling=False`"),
    Row("Beit", FLAT, "beit", PATCHES, "h", "as it comes"),
    Row(
        "Data2VecVision", {**FLAT, "use_mean_pooling": False}, "data2vec_vision", CLS, "h", "`use_mean_pooling=False`"
    ),
    Row("Data2VecVision", FLAT, "data2vec_vision", PATCHES, "h", "as it comes"),
    Row("CLIP", PAIR, "vision_model", PATCHES),
    Row("MetaClip2", PAIR, "vision_model", PATCHES),
    Row("Siglip", PAIR, "vision_model", TOKENS),
    Row("Siglip2", {**PAIR, "vision_config": {**FLAT, "num_patches": 4}}, "vision_model", TOKENS),
    Row("IJepa", FLAT, "ijepa", TOKENS),
    Row("Swin", WINDOWED, "swin", POOLER, "last stage"),
    Row("Swinv2", WINDOWED, "swinv2", POOLER, "last stage"),
    Row("ConvNext", CONVNEXT, "convnext", POOLER, "last stage"),
    Row("ConvNextV2", CONVNEXT, "convnextv2", POOLER, "last stage"),
    Row("PvtV2", PYRAMID, "pvt_v2", POOLER, "last stage", "mean of the last stage", 32),
]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.reads.replace(' ', '-')}")


def build(row: Row, num_labels: int = 2):
    torch.manual_seed(0)
    config = getattr(transformers, f"{row.model}Config")(**row.config, num_labels=num_labels)
    return getattr(transformers, f"{row.model}ForImageClassification")(config).eval()


def inputs(row: Row):
    if row.model != "Siglip2":
        return {"pixel_values": pictures(3, row.size)}
    return {  # takes patches, of pictures of any shape
        "pixel_values": torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(1)),
        "pixel_attention_mask": torch.ones(3, 4, dtype=torch.long),
        "spatial_shapes": torch.tensor([[2, 2]] * 3),
    }


@every_row
def test_the_head_is_found_and_reads_what_the_table_says(row: Row):
    base = build(row)
    images = inputs(row)
    with torch.no_grad():
        own = getattr(base, row.trunk)(**images)
    if row.model == "PvtV2":
        expected = own.last_hidden_state.flatten(2).mean(dim=2)
    elif row.reads == POOLER or (row.reads == PATCHES and row.trunk in ("beit", "data2vec_vision")):
        expected = own.pooler_output  # BEiT's is the patches' mean, normed
    else:
        expected = READ[row.reads](own.last_hidden_state)
    head_width = base.classifier.in_features
    if row.reads != CLS:
        with pytest.raises(ValueError, match=r"does not read \[CLS\] .*outside the method.*pooled='any'"):
            get_peft_model(base, expert_config())
        with pytest.raises(ValueError, match=r"does not read \[CLS\]"):  # naming the head does not get around it
            get_peft_model(base, expert_config(target_modules=["classifier"]))
    assert not any(isinstance(module, LucaLayer) for module in base.modules())
    model = get_peft_model(base, expert_config(pooled="cls" if row.reads == CLS else "any")).eval()
    assert model.base_model.targeted_module_names == ["classifier"]
    assert head_width == (32 if row.widths == "2h" else 16)
    read = []
    layer = model.base_model.layer
    layer.register_forward_hook(
        lambda _, inputs, output: read.append(cls_of(inputs[0], layer.width, layer.input_width))
    )
    assert model(**images).logits.shape == (3, 3)
    torch.testing.assert_close(read[0], expected)
    if row.model != "Siglip2":  # which needs more than pixel values
        torch.testing.assert_close(model.pooled_features(**images), expected)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.config.get("hidden_size")], ids=lambda row: f"{row.model}-{row.reads}"
)
def test_a_base_without_labels(row: Row):
    base = build(row, num_labels=0)
    assert isinstance(base.classifier, nn.Identity)
    with pytest.raises(ValueError, match=r"no labels to take class names from: pass LucaConfig\(classes="):
        get_peft_model(base, LucaConfig(pooled="any", reduction=4))
    model = get_peft_model(base, expert_config(pooled="any")).eval()
    labelled = get_peft_model(build(row), expert_config(pooled="any"))
    torch.testing.assert_close(model.pooled_features(**inputs(row)), labelled.pooled_features(**inputs(row)))
    assert isinstance(model.unload().classifier, nn.Identity)


@pytest.mark.parametrize("model", ["Pvt", "CLIP", "ConvNext"])
def test_a_base_without_labels_whose_width_no_one_tells(model: str):
    base = build(next(row for row in ROWS if row.model == model), num_labels=0)
    with pytest.raises(ValueError, match=r"'classifier' .* is a Identity, .*hidden_size.*num_labels of 1 or more"):
        get_peft_model(base, expert_config(pooled="any"))


def test_deit_with_a_teacher_is_refused_by_name():
    base = transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**FLAT))
    with pytest.raises(ValueError, match=r"two heads on two tokens. Load .* as DeiTForImageClassification\."):
        get_peft_model(base, expert_config(pooled="any"))


def test_a_trunk_without_a_head_says_what_to_load():
    base = transformers.ViTModel(transformers.ViTConfig(**FLAT))
    with pytest.raises(ValueError, match=r"finds none in ViTModel. Load .* AutoModelForImageClassification, or name"):
        get_peft_model(base, expert_config())


# ---- any module with a named head -----------------------------------------------------------------------------------


class OwnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 24), nn.ReLU())
        self.fc = nn.Linear(24, 5)
        self.aux = nn.Linear(24, 5)

    def forward(self, x: Tensor):
        return self.fc(self.body(x))


@pytest.mark.parametrize("target", ["fc", ["fc"]])
def test_any_module_with_a_named_head(target: str | list[str]):
    torch.manual_seed(0)
    base = OwnNet()
    before = logits(base)
    model = get_peft_model(base, expert_config(target_modules=target)).eval()
    assert logits(model).shape == (4, 3)
    model.add_adapter("own-labels", LucaConfig(target_modules=target, reduction=4))
    assert model.experts["own-labels"] == ("0", "1", "2", "3", "4")
    model.set_router("entropy")
    assert logits(model).shape == (4, 8)
    torch.testing.assert_close(logits(model.unload()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "looking for a classifier finds none in OwnNet"),
        (["head"], r"target_modules=\['head'\] names none in OwnNet"),
        (["fc", "aux"], r"exactly one head, but .* names 2 \(fc, aux\) in OwnNet"),
        (["body"], "'body' of OwnNet is a Sequential, but LuCA needs a Linear"),
    ],
)
def test_not_exactly_one_head(target: list[str] | None, message: str):
    base = OwnNet()
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, expert_config(target_modules=target))
    assert type(base.fc) is nn.Linear


def test_a_head_that_reads_no_vector_says_so():
    base = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    model = get_peft_model(base, expert_config(target_modules=["1"]), adapter_name="birds").eval()
    with pytest.raises(ValueError, match=r"reads a tensor of shape \(batch, 16\), got \(4, 3, 8, 16\)"):
        model(pictures())


# ---- timm, through transformers' wrapper ----------------------------------------------------------------------------


class _Anything(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return name  # timm keys dicts by torchvision's constants


class _StandIn(ModuleType):
    """A torchvision with nothing in it: timm imports it for augmentations and layers that no model here has."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (nn.Module,), {})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None):
        here = name == "torchvision" or name.startswith("torchvision.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if here else None

    def create_module(self, spec: importlib.machinery.ModuleSpec):
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType):
        pass


@pytest.fixture(scope="module")
def timm():
    """timm, with an empty torchvision where there is none (its CPU build is not on every index)."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed (pip install peft-luca[dev])")
    missing = importlib.util.find_spec("torchvision") is None
    finder = _StandInFinder()
    with pytest.MonkeyPatch.context() as patch:
        if missing:
            patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
            patch.setattr(transformers.utils.import_utils, "is_torchvision_available", lambda: True)
            transformers.utils.import_utils.is_timm_available.cache_clear()
        import timm

        yield timm
    if missing:
        transformers.utils.import_utils.is_timm_available.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


def wrapped(architecture: str, **model_args: Any):
    from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperForImageClassification

    torch.manual_seed(0)
    config = transformers.TimmWrapperConfig(architecture=architecture, num_labels=2, model_args=model_args)
    return TimmWrapperForImageClassification(config).eval()


TINY_TIMM = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_timm_with_token_pooling(timm: ModuleType):
    base = wrapped("vit_tiny_patch16_224", **TINY_TIMM)
    with torch.no_grad():
        cls = base.timm_model.forward_features(pictures(3))[:, 0]
    model = get_peft_model(base, expert_config()).eval()
    assert model.base_model.targeted_module_names == ["timm_model.head"]
    torch.testing.assert_close(model.pooled_features(pictures(3)), cls)
    model.add_adapter("more", expert_config(["a", "b"]))
    model.set_router("entropy")
    assert logits(model).shape == (4, 5)
    assert type(model.unload().timm_model.get_classifier()) is nn.Linear


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_timm_with_other_pooling_is_outside_the_method(timm: ModuleType):
    base = wrapped("vit_tiny_patch16_224", **TINY_TIMM, global_pool="avg")
    with pytest.raises(ValueError, match=r"does not read \[CLS\]"):
        get_peft_model(base, expert_config())
    model = get_peft_model(base, expert_config(pooled="any")).eval()
    assert logits(model).shape == (4, 3)


# ---- the table in the docs ------------------------------------------------------------------------------------------

HEADER = """<!-- Written by `python tests/tuner/test_architectures.py`, whose tests check every row. Do not edit. -->
# Backbones

The head is found without being named. LuCA goes in its place and reads what enters it. h is `config.hidden_size`.

The method reads **[CLS]**. Models whose head reads another pooled vector are refused, unless you say
`LucaConfig(pooled="any")`: what you then get works, but lies outside the method.

| model in transformers | LuCA reads | its head reads | how | |
|---|---|---|---|---|
"""
FOOTER = """| timm, through `AutoModelForImageClassification` | [CLS] | the timm model's width | as it is | with `global_pool="token"` |
| timm, through `AutoModelForImageClassification` | another pooling | the timm model's width | `pooled="any"` | |
| `DeiTForImageClassificationWithTeacher` | | | refused | two heads on two tokens: load it as `DeiTForImageClassification` |
| any `nn.Module` with a Linear head | what enters it | | `target_modules=["its name"]` | you vouch for its being [CLS] |

transformers' other image classifiers (Hiera, EfficientNet, MobileViT, …) need `pooled="any"` too. Heads that are no
`Linear`, as ResNet's, are refused; name the Linear inside, as in `target_modules=["classifier.1"]`. transformers 5.24
has no image classifier for DINOv3. A base without labels (`num_labels=0`) has an Identity for a head, which does as
well where `config.hidden_size` gives its width.
"""  # noqa: E501


def table():
    lines = []
    for row in ROWS:
        how = "as it is" if row.reads == CLS else '`pooled="any"`'
        lines.append(f"| `{row.model}ForImageClassification` | {row.reads} | {row.widths} | {how} | {row.note} |")
    return HEADER + "\n".join(lines) + "\n" + FOOTER


def test_the_docs_have_the_table():
    assert DOCS.read_text(encoding="utf-8") == table(), "run: python tests/tuner/test_architectures.py"


def test_a_head_inside_a_sequential_can_be_named_as_the_docs_say():
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 16], depths=[1, 1], layer_type="basic")
    base = transformers.ResNetForImageClassification(config).eval()
    with pytest.raises(ValueError, match="'classifier' of ResNetForImageClassification is a Sequential"):
        get_peft_model(base, expert_config(pooled="any"))
    model = get_peft_model(base, expert_config(pooled="any", target_modules=["classifier.1"])).eval()
    assert logits(model, pictures(2, 32)).shape == (2, 3)


if __name__ == "__main__":
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(table(), encoding="utf-8")
