"""The model card: all of its text, what the Hub makes of it, and what strangers' names can do to it."""

import re
import struct
import sys

import pytest
import torch
from helpers import make_model
from hub_server import card_errors
from huggingface_hub import ModelCard

from peft_luca.hub.model_card import (
    MAX_CLASS_TAGS,
    TAGS,
    CardFacts,
    class_tag,
    collection_figures,
    draw_accuracy_matrix,
    expert_figures,
    make_card,
)


RESULTS = {
    "settings": {"recipe": "own", "learning_rate": 1e-3, "optim_args": None, "luca_config": {"scale": 20.0}},
    "tasks": [
        {"name": "zeta", "accuracy": [0.9], "routing": [1.0], "task_known": [0.95]},
        {"name": "alpha", "accuracy": [0.8, 0.7], "routing": [1.0, 0.5], "task_known": [0.95, None]},
    ],
    "accuracy_matrix": [[0.9, None], [0.8, 0.7]],
    "average_accuracy": 0.825,
    "last_accuracy": 0.75,
    "forgetting": 0.1,
    "backward_transfer": -0.1,
    "routing_accuracy": None,
    "task_known_accuracy": 0.95,
}
PATTERN = r"""---
base_model: google/vit-base-patch16-224-in21k
datasets:
- cifar100
library_name: peft
license: apache-2\.0
pipeline_tag: image-classification
tags:
- luca
- continual-learning
- image-classification
- vision
- class:red-fox
- class:b
- class:c
model-index:
- name: pair
  results:
  - task:
      type: image-classification
    dataset:
      name: cifar100
      type: cifar100
    metrics:
    - type: accuracy
      value: 0\.75
      name: Accuracy after the last task
    - type: accuracy
      value: 0\.825
      name: Average incremental accuracy
    - type: forgetting
      value: 0\.1
      name: Forgetting
    - type: backward_transfer
      value: -0\.1
      name: Backward transfer
    - type: accuracy
      value: 0\.95
      name: Accuracy with the task known
---

# pair

2 LuCA experts on the pooled \[CLS\] vector of \[google/vit-base-patch16-224-in21k\]\(https://huggingface\.co/google/vit-base-patch16-224-in21k\),
which stays frozen: [^\n]+
[^\n]+ an ordinary PEFT adapter in each subfolder, and `experts\.json` with their order and router\.

## How to use

```python
import peft_luca
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

backbone = "google/vit-base-patch16-224-in21k"
vit = AutoModelForImageClassification\.from_pretrained\(backbone\)
model = peft_luca\.load_experts\(vit, "lab/pair"\)
model\.set_router\("auto"\)

[^`]+
print\(classify\(image, top_k=1\)\)
```

`import peft_luca` comes first: [^\n]+

## Experts

\| expert \| classes \| parameters \| sparsity \|
\|---\|---\|---\|---\|
\| zeta \| 2: Red fox, b \| 419 \| \d+\.\d % \|
\| alpha \| 1: c \| 387 \| \d+\.\d % \|

Sparsity is the share of [^\n]+ Fingerprint of the backbone:
`[0-9a-f]{64}`\. An expert refuses a backbone with another one\.

## Evaluation

\| metric \| value \|
\|---\|---\|
\| Accuracy after the last task \| 75\.0 % \|
\| Average incremental accuracy \| 82\.5 % \|
\| Forgetting \| 10\.0 % \|
\| Backward transfer \| -10\.0 % \|
\| Accuracy with the task known \| 95\.0 % \|

\| task \| accuracy, routed \| right expert chosen \| accuracy, task known \|
\|---\|---\|---\|---\|
\| zeta \| 80\.0 % \| 100\.0 % \| 95\.0 % \|
\| alpha \| 70\.0 % \| 50\.0 % \| – \|

!\[Accuracy of every task after every stage\]\(accuracy_matrix\.png\)

## Training procedure

\| setting \| value \|
\|---\|---\|
\| `recipe` \| own \|
\| `learning_rate` \| 0\.001 \|
\| `arrangement` \| adapter\\_calibrator \|
\| `norm_position` \| after\\_residual \|
\| `reduction` \| 16 \|
\| `reference` \| True \|

### Framework versions

- peft_luca \S+
- Python \S+
- peft \S+
- transformers \S+
- torch \S+
- datasets \S+
- huggingface_hub \S+

## Citation

```bibtex
@article\{yildirim2026unlocking,
[^`]+\}
```
"""


def card(experts, expert=None, picture=False, **facts):
    return make_card(make_model(experts).base_model, "lab/pair", CardFacts(**facts), expert=expert, picture=picture)


def test_all_of_a_collections_card():
    text = card(
        {"zeta": ["Red fox", "b"], "alpha": ["c"]},
        base_model="google/vit-base-patch16-224-in21k",
        license="apache-2.0",
        datasets="cifar100",
        results=RESULTS,
        picture=True,
    )
    pattern = PATTERN.split("\n")
    for wanted, line in zip(pattern, text.split("\n"), strict=False):  # says which line it is, where that can be said
        if "[^`]" in wanted:
            break
        assert re.fullmatch(wanted, line), f"{line!r} is not {wanted!r}"
    assert re.fullmatch(PATTERN, text)
    assert card_errors(text) == []
    data = ModelCard(text).data
    assert data.model_name == "pair"
    assert [result.metric_value for result in data.eval_results] == [0.75, 0.825, 0.1, -0.1, 0.95]


def test_an_experts_card():
    text = card({"zeta": ["a", "b"], "alpha": ["c"]}, expert="zeta", results=RESULTS, base_model="google/vit")
    assert "A LuCA expert on the pooled [CLS] vector of" in text
    assert "an ordinary PEFT adapter at the root of this repository." in text
    assert 'model = peft_luca.load_expert(vit, "lab/pair")\n' in text
    assert (
        "| Accuracy over its own classes | 95.0 % |\n| Accuracy over the classes of all experts, routed | 80.0 % |"
        in text
    )
    assert "set_router" not in text
    assert "![" not in text
    assert card_errors(text) == []


def test_a_card_of_which_little_is_known():
    text = card({"t": ["a"]}, expert="t")
    assert card_errors(text) == []
    data = ModelCard(text).data.to_dict()
    assert not {"base_model", "license", "datasets", "model-index"} & set(data)
    assert "## Evaluation" not in text
    assert 'backbone = "path/to/the/backbone"' in text
    assert "None" not in text


@pytest.mark.parametrize(
    "name",
    ["a|b", "# title", "<script>alert(1)</script>", "[x](http://evil)", "![x](http://evil)", "`code`", "--- key: 1",
     "{{ 7 * 7 }}", "a: b", "- c", "true", "3", "'", '"', "🙂", "{% raw %}", "*b*", "&lt;"],
)  # fmt: skip
def test_names_of_classes_cannot_make_markup(name):
    plain, text = (card({"t": [one, "other"]}, expert="t") for one in ("plain", name))
    assert card_errors(text) == []
    assert len(text.splitlines()) == len(plain.splitlines())
    row = next(line for line in text.splitlines() if line.startswith("| t |"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 5
    assert not re.search(r"(?<!\\)[<`*\[]", row)
    assert "49" not in row
    tags = ModelCard(text).data.tags
    assert tags[4] == class_tag(name)
    assert all(isinstance(tag, str) for tag in tags)


def test_class_tags():
    assert class_tag("Red fox") == "class:red-fox"
    assert class_tag("RED_FOX ") == "class:red-fox"
    assert class_tag("ß") == class_tag("SS") == "class:ss"
    assert class_tag("狗") == "class:狗"
    assert class_tag("!?") == "class:-"
    many = card({"t": [str(i) for i in range(MAX_CLASS_TAGS + 1)]})
    assert "class:" not in many


def test_more_metadata():
    more = {"language": "en", "tags": ["mine"], "model_name": "Two *experts*"}
    text = card({"t": ["a"]}, card_data=more, results=RESULTS)
    assert card_errors(text) == []
    data = ModelCard(text).data
    assert (data.language, data.model_name, data.tags[:5]) == ("en", "Two *experts*", [*TAGS, "mine"])
    assert "# Two \\*experts\\*\n" in text
    assert more == {"language": "en", "tags": ["mine"], "model_name": "Two *experts*"}


def test_figures():
    assert collection_figures({}) == {}
    assert "routing_accuracy" not in collection_figures(RESULTS)
    assert expert_figures(RESULTS, "zeta") == {"task_known_accuracy": 0.95, "accuracy": 0.8}
    assert expert_figures(RESULTS, "alpha") == {"accuracy": 0.7}
    assert expert_figures(RESULTS, "nobody") == expert_figures({}, "zeta") == {}


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "matrix.png"
    assert draw_accuracy_matrix(RESULTS, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (480, 400)
    assert len(content) < 50_000
    assert draw_accuracy_matrix(RESULTS, path)
    assert path.read_bytes() == content  # nothing of the time in it
    large = torch.rand(30, 30).tolist()
    assert draw_accuracy_matrix({"accuracy_matrix": large}, path)
    assert path.stat().st_size < 50_000


def test_no_picture(tmp_path, monkeypatch):
    assert not draw_accuracy_matrix({}, tmp_path / "x.png")
    assert not draw_accuracy_matrix({"accuracy_matrix": [[None]]}, tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.warns(UserWarning, match="matplotlib is not installed"):
        assert not draw_accuracy_matrix(RESULTS, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
