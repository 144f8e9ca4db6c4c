"""A model that is compiled, exported, written as ONNX or put on a quantized trunk gives the same logits."""

import copy
import importlib.util
import json

import numpy as np
import pytest
import torch
from helpers import ANIMALS, SKIES, expert_config, files_in, logits, pictures, tiny_vit, with_experts
from peft import PeftModel
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import ViTImageProcessorPil

from peft_luca import export_onnx
from peft_luca.routing import ROUTERS, ScoreRouter


DISJOINT = {"animals": ANIMALS, "skies": SKIES}
SHARED = {"animals": ANIMALS, "pets": ["cat", "dog", "hamster"]}


# Experts that share no class and experts that share some take different ways through the label space.
def cases(*pairs):
    return pytest.mark.parametrize(("experts", "router"), pairs)


BY_STATISTICS = ("auto", "gaussian", "lda", "ridge")
BATCH = {0: torch.export.Dim("batch")}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def routed(experts, router):
    model = with_experts(**experts)
    for name, classes in experts.items() if router in BY_STATISTICS else ():
        features = torch.randn(40, 16, generator=torch.Generator().manual_seed(len(name)))
        model.collect_statistics(name, features, torch.arange(40) % len(classes), random_features=32)
    model.set_router(router)
    return model


class Margin(ScoreRouter):
    """A router of someone else's, outside the package."""

    name = "margin"

    def cost(self, scores):
        best = scores.topk(2, dim=-1).values
        return best[..., 1] - best[..., 0]


MARGIN = Margin(temperature=2.0)


class OnlyLogits(nn.Module):
    """What is exported: pixel values in, logits out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values).logits


def exportable(model):
    return OnlyLogits(model.get_base_model()).eval()


SLOW = [
    pytest.param(SHARED, router, marks=pytest.mark.slow) for router in ("lda", "ridge", "nearest", "energy", "entropy")
]


@cases((SHARED, "entropy"), (DISJOINT, "gaussian"), *SLOW[:3])
def test_compile_is_one_graph_for_every_batch_size(experts, router):
    model = routed(experts, router)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for batch in (10, 11, 13):  # no number of classes or rows, which torch would take for the same number
        torch.testing.assert_close(logits(compiled, pictures(batch)), logits(model, pictures(batch)))
    assert counter.frame_count == 1
    if router == "entropy":
        model.add_adapter("rocks", expert_config(["flint", "slate"]))
        model.eval()
        for batch in (4, 7):
            torch.testing.assert_close(logits(compiled, pictures(batch)), logits(model, pictures(batch)))
        assert counter.frame_count == 2  # once more for the expert that was added


def test_compiled_training_has_the_same_gradients():
    plain = with_experts(**DISJOINT)
    compiled = copy.deepcopy(plain)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    labels = torch.tensor([0, 1, 2, 0])
    for model in (plain, run):
        model.train()
        model(pictures(), labels=labels).loss.backward()
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None) is ("luca_" not in name or ".animals" not in name)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("router", [*sorted(set(ROUTERS) - {"oracle"}), MARGIN])
def test_every_router_is_exported_for_every_batch_size(router):
    model = routed(SHARED, router)
    program = torch.export.export(exportable(model), (pictures(3),), dynamic_shapes=(BATCH,)).module()
    for batch in (1, 3, 64):
        expected = logits(model, pictures(batch))
        torch.testing.assert_close(program(pictures(batch)).detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime: pip install peft-luca[onnx]",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@cases((SHARED, None), (SHARED, "auto"), *SLOW)
def test_onnx_has_the_logits_the_expert_and_whether_it_is_known(experts, router, tmp_path):
    import onnxruntime

    model, path = routed(experts, router), tmp_path / "model.onnx"
    export_onnx(model.train(), path, ViTImageProcessorPil(size={"height": 8, "width": 8}))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 3, 64):
        answer, expert, known = session.run(None, {"pixel_values": pictures(batch).numpy()})
        np.testing.assert_allclose(answer, logits(model, pictures(batch)).numpy(), rtol=1e-4, atol=1e-4)
        if router:
            routing = model.route(pictures(batch))
            assert expert.tolist() == routing.expert.tolist()
            np.testing.assert_allclose(known, routing.known.numpy(), atol=1e-4)
    assert files_in(tmp_path) == ["model.onnx"]
    about = json.loads(session.get_modelmeta().custom_metadata_map["peft_luca"])
    assert about["classes"] == list(model.classes if router else experts["animals"])
    assert about["experts"] == list(experts)
    assert about["unknown_below"] == (0.05 if router in BY_STATISTICS else 0.0)
    assert about["images"] == {"channels": 3, "background": "white", "white_level": None}
    assert about["processor"]["size"] == {"height": 8, "width": 8}


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install torchao")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_quantized_trunk_is_the_same_backbone_by_its_cls(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def quantized():
        base = tiny_vit()
        quantize_(base.vit, Int8WeightOnlyConfig())
        return base

    model = with_experts(**DISJOINT)
    for name in DISJOINT:
        model.compute_reference(name)
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    with pytest.warns(UserWarning, match="deviations away, as with another dtype or a quantized trunk, so it was"):
        small = PeftModel.from_pretrained(quantized(), str(tmp_path / "animals"), adapter_name="animals")
    with pytest.warns(UserWarning, match=r"expert 'skies' was trained on the backbone .* so it was loaded"):
        small.load_adapter(str(tmp_path / "skies"), "skies")
    for one in (model, small):
        one.set_router("entropy")
    torch.testing.assert_close(logits(small), logits(model), rtol=0.1, atol=0.3)
    assert not torch.equal(logits(small), logits(model))
    trained = with_experts(quantized(), **DISJOINT).train()
    trained(pictures(), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
    with_gradient = {name for name, p in trained.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, p in trained.named_parameters() if p.requires_grad}
