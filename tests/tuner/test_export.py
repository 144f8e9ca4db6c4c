"""Compiled, exported, as ONNX, and on a quantised trunk: the same answers."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_models import ANIMALS, SKIES, expert_config, logits, pictures, tiny_vit, with_experts
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter


# Experts that share no class, that share some, and one that cannot score the others' classes.
DISJOINT = {"animals": ANIMALS, "skies": SKIES}
SHARED = {"animals": ANIMALS, "pets": ["cat", "dog", "hamster"]}
collections = pytest.mark.parametrize("experts", [DISJOINT, SHARED], ids=["disjoint", "shared"])
routers = pytest.mark.parametrize("router", [None, "entropy"])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def routed(experts: dict[str, list[str]], router: str | None, linear: bool = True) -> PeftModel:
    model = with_experts(**experts)
    if linear:
        model.add_adapter("linear", expert_config(["cat", "zebra"], head="linear"))
    model.set_router(router)
    return model.eval()


class OnlyLogits(nn.Module):
    """What is exported: pixel values in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        answer: Tensor = self.model(pixel_values).logits
        return answer


def exportable(model: PeftModel) -> nn.Module:
    return OnlyLogits(model.get_base_model()).eval()


BATCH = {0: torch.export.Dim("batch")}


# ---- torch.compile --------------------------------------------------------------------------------------------------


@collections
@routers
def test_compile_is_one_graph_for_every_batch_size(experts: dict[str, list[str]], router: str | None) -> None:
    model = routed(experts, router)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for batch in (4, 6, 9):
        torch.testing.assert_close(logits(compiled, pictures(batch)), logits(model, pictures(batch)))
    assert counter.frame_count == 1
    model.add_adapter("rocks", expert_config(["flint", "slate"]))
    model.eval()
    for batch in (4, 7):
        torch.testing.assert_close(logits(compiled, pictures(batch)), logits(model, pictures(batch)))
    assert counter.frame_count == 2  # once more for the expert that was added, and no more for another batch size


def test_compiled_training_is_training() -> None:
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


# ---- torch.export and ONNX ------------------------------------------------------------------------------------------


@collections
@routers
def test_export(experts: dict[str, list[str]], router: str | None) -> None:
    model = routed(experts, router)
    program = torch.export.export(exportable(model), (pictures(3),), dynamic_shapes=(BATCH,))
    for batch in (1, 9):
        torch.testing.assert_close(
            program.module()(pictures(batch)).detach(), logits(model, pictures(batch)), rtol=1e-5, atol=1e-6
        )


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime: pip install peft-luca[onnx]",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@collections
@routers
def test_onnx(experts: dict[str, list[str]], router: str | None, tmp_path: Path) -> None:
    import onnxruntime

    model = routed(experts, router)
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        exportable(model), (pictures(3),), path, dynamo=True, dynamic_shapes=(BATCH,), verbose=False, optimize=True
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 3, 64):
        (answer,) = session.run(None, {session.get_inputs()[0].name: pictures(batch).numpy()})
        expected = logits(model, pictures(batch)).numpy()
        np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-4)
        assert (answer.argmax(axis=1) == expected.argmax(axis=1)).all()


# ---- a quantised trunk ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install torchao")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_quantised_trunk(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def quantised() -> Any:
        base = tiny_vit()
        quantize_(base.vit, Int8WeightOnlyConfig())
        return base

    model = with_experts(**DISJOINT)
    for name in DISJOINT:
        model.compute_reference(name)
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    # Another backbone by its fingerprint, the same one by [CLS] on the reference pictures.
    with pytest.warns(UserWarning, match="deviations away, as with another dtype or a quantised trunk, so it was"):
        small = PeftModel.from_pretrained(quantised(), str(tmp_path / "animals"), adapter_name="animals")
    with pytest.warns(UserWarning, match=r"expert 'skies' was trained on the backbone .* so it was loaded"):
        small.load_adapter(str(tmp_path / "skies"), "skies")
    for one in (model, small):
        one.eval()
        one.set_router("entropy")
    torch.testing.assert_close(logits(small), logits(model), rtol=0.1, atol=0.3)
    assert not torch.equal(logits(small), logits(model))

    trained = with_experts(quantised(), **DISJOINT)
    trained.train()
    trained(pictures(), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
    assert {name for name, p in trained.named_parameters() if p.grad is not None} == {
        name for name, p in trained.named_parameters() if p.requires_grad
    }
