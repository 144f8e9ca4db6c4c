"""A model that is compiled, exported, written as ONNX or put on a quantized trunk gives the same logits."""

import copy
import importlib.util

import numpy as np
import pytest
import torch
from helpers import ANIMALS, SKIES, expert_config, logits, pictures, tiny_vit, with_experts
from peft import PeftModel
from torch import nn
from torch._dynamo.testing import CompileCounter


DISJOINT = {"animals": ANIMALS, "skies": SKIES}
SHARED = {"animals": ANIMALS, "pets": ["cat", "dog", "hamster"]}


# Experts that share no class and experts that share some take different ways through the label space.
def cases(*pairs):
    return pytest.mark.parametrize(("experts", "router"), pairs)


BATCH = {0: torch.export.Dim("batch")}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def routed(experts, router):
    model = with_experts(**experts)
    if router == "gaussian":
        for name, classes in experts.items():
            features = torch.randn(40, 16, generator=torch.Generator().manual_seed(len(name)))
            model.collect_statistics(name, features, torch.arange(40) % len(classes))
    model.set_router(router)
    return model


class OnlyLogits(nn.Module):
    """What is exported: pixel values in, logits out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values).logits


def exportable(model):
    return OnlyLogits(model.get_base_model()).eval()


@cases((SHARED, "entropy"), (DISJOINT, "gaussian"))
def test_compile_is_one_graph_for_every_batch_size(experts, router):
    model = routed(experts, router)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for batch in (4, 6, 9):
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


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime: pip install peft-luca[onnx]",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@cases((SHARED, None), (DISJOINT, "entropy"), (SHARED, "gaussian"))
def test_export_and_onnx(experts, router, tmp_path):
    import onnxruntime

    model = routed(experts, router)
    program = torch.export.export(exportable(model), (pictures(3),), dynamic_shapes=(BATCH,))
    path = tmp_path / "model.onnx"
    torch.onnx.export(program, (), path, dynamo=True, verbose=False, optimize=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 3, 64):
        expected = logits(model, pictures(batch))
        torch.testing.assert_close(program.module()(pictures(batch)).detach(), expected, rtol=1e-5, atol=1e-5)
        (answer,) = session.run(None, {session.get_inputs()[0].name: pictures(batch).numpy()})
        np.testing.assert_allclose(answer, expected.numpy(), rtol=1e-4, atol=1e-4)
        assert (answer.argmax(axis=1) == expected.numpy().argmax(axis=1)).all()


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
