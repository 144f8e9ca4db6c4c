"""Routers on the same experts: what each computes, that order and company change nothing, and how they are kept."""

import copy
import json
import warnings

import pytest
import torch
from helpers import make_trainer
from peft import PeftModel, get_peft_model
from transformers import ViTConfig, ViTForImageClassification

from peft_luca import ContinualTrainingArguments, LucaConfig, load_experts, save_expert, save_experts
from peft_luca.routing.discriminants import Gaussian, gather_statistics
from peft_luca.routing.router import ROUTERS, energy, entropy, margin, max_prob
from peft_luca.routing.statistics import STATISTICS_NAME, ClassStatistics, pool
from peft_luca.training.sparsity import overlap_report
from peft_luca.utils import InvalidExpertError


D = 16
ANIMALS, SKIES, TREES = ["cat", "dog", "owl"], ["sun", "moon"], ["oak", "cat"]  # trees share a class with animals
BY_STATISTICS = ["prototype", "gaussian", "ridge", "hybrid"]
BY_SCORES = ["entropy", "max_prob", "margin", "energy"]


def vit():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=2,
    )
    return ViTForImageClassification(config).eval()


def images_of(name, images=12):
    """[CLS] of a class: the same whoever asks."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return 3 * torch.randn(D, generator=generator) + torch.randn(images, D, generator=generator)


def with_experts(statistics=True, **experts):
    model = vit()
    for name, classes in experts.items():
        torch.manual_seed(sum(name.encode()))
        config = LucaConfig(classes=classes, reduction=4)
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name)
        model.base_model.layer.luca_reference_mean[name] += 0.5
        if statistics:
            # Each expert of a shared class has half of its images.
            z = [images_of(c)[6 * (name == "trees") :][: 6 if c == "cat" else 12] for c in classes]
            labels = torch.cat([torch.full((len(x),), k) for k, x in enumerate(z)])
            model.base_model.collect_statistics(name, torch.cat(z), labels, random_features=40)
    return model.eval()


def routed(model, router, z=None, **options):
    model.base_model.set_router(router, **options)
    z = torch.cat([images_of(name) for name in ("cat", "sun", "oak")]) if z is None else z
    with torch.no_grad():
        return model.base_model.layer.route(z)


SCORES = torch.tensor([[[2.0, 1.0, -1.0], [0.5, 0.5, 0.5], [-torch.inf, 3.0, 1.0]]])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_score_routers_are_their_formulas(temperature):
    p = torch.softmax(SCORES.double() / temperature, -1)
    top = p.sort(-1, descending=True).values
    wanted = {
        entropy: -torch.where(p > 0, p * p.log(), 0.0).sum(-1),
        max_prob: -top[..., 0].log(),
        margin: top[..., 1] - top[..., 0],
        energy: -temperature * (SCORES.double() / temperature).exp().sum(-1).log(),
    }
    for router, value in wanted.items():
        torch.testing.assert_close(router(SCORES, temperature=temperature), value.float())
        with pytest.raises(ValueError, match="temperature must be a finite number"):
            router(SCORES, temperature=0.0)
    assert margin(SCORES[:, :2, :1]).isfinite().all()


@pytest.mark.parametrize("router", [*BY_SCORES, *BY_STATISTICS])
def test_an_answer_depends_on_its_image_alone(router):
    model = with_experts(animals=ANIMALS, skies=SKIES, trees=TREES)
    z = torch.cat([images_of(name) for name in ("cat", "sun", "oak", "owl")])
    together, alone = routed(model, router, z), [routed(model, router, x[None]) for x in z]
    torch.testing.assert_close(together.logits, torch.cat([one.logits for one in alone]), rtol=1e-4, atol=1e-4)
    assert torch.equal(together.expert, torch.cat([one.expert for one in alone]))
    assert together.logits.isfinite().all()
    assert together.logits.shape == (len(z), 6)


@pytest.mark.parametrize("router", BY_STATISTICS)
def test_order_of_experts_changes_numbering_alone(router):
    names = {"animals": ANIMALS, "skies": SKIES, "trees": TREES}
    one, other = with_experts(**names), with_experts(**dict(reversed(names.items())))
    first, second = routed(one, router), routed(other, router)
    columns = [other.base_model.classes.index(name) for name in one.base_model.classes]
    assert torch.equal(first.logits, second.logits[:, columns])
    assert torch.equal(first.expert, 2 - second.expert)


@pytest.mark.parametrize("router", BY_STATISTICS)
def test_deleting_an_expert_leaves_the_model_that_never_had_it(router):
    model = with_experts(animals=ANIMALS, skies=SKIES, trees=TREES)
    routed(model, router)
    model.delete_adapter("trees")
    never = with_experts(animals=ANIMALS, skies=SKIES)
    left, wanted = routed(model, router), routed(never, router)
    assert torch.equal(left.logits, wanted.logits)
    assert torch.equal(left.expert, wanted.expert)


def test_adding_an_expert_is_followed():
    model = with_experts(animals=ANIMALS)
    routed(model, "gaussian")
    model.add_adapter("skies", LucaConfig(classes=SKIES, reduction=4))
    with pytest.raises(ValueError, match="'skies' came without"):
        model.base_model.layer.route(images_of("cat"))


def test_gaussian_answers_by_the_pooled_statistics_and_credits_an_owner():
    model = with_experts(animals=ANIMALS, skies=SKIES, trees=TREES)
    output = routed(model, "gaussian")
    layer = model.base_model.layer
    pooled = pool(gather_statistics(layer))
    x = layer.unit_features(torch.cat([images_of(name) for name in ("cat", "sun", "oak")]), "animals")
    wanted = Gaussian(pooled).log_posterior(x)[:, [pooled.classes.index(name) for name in model.base_model.classes]]
    assert torch.equal(output.logits, wanted)
    assert output.entropies is None
    answers = [model.base_model.classes[i] for i in output.logits.argmax(1)]
    experts = list(model.base_model.experts.items())
    assert all(answer in experts[t][1] for answer, t in zip(answers, output.expert.tolist(), strict=True))
    assert answers == ["cat"] * 12 + ["sun"] * 12 + ["oak"] * 12
    assert {int(t) for t in output.expert[:12]} == {0, 2}  # both owners of "cat" are nearest to some of its images


def test_hybrid_lets_experts_choose_among_their_classes():
    model = with_experts(animals=ANIMALS, skies=SKIES)
    layer, z = model.base_model.layer, torch.cat([images_of(name) for name in ("cat", "sun", "oak")])
    router, hybrid = routed(model, "gaussian", z).logits, routed(model, "hybrid", z, expert_weight=0.3).logits
    wanted = torch.empty_like(router)
    with torch.no_grad():
        for name, own in (("animals", [0, 1, 2]), ("skies", [3, 4])):
            total = router[:, own].logsumexp(1, keepdim=True)
            mixed = 0.7 * (router[:, own] - total) + 0.3 * layer.expert_logits(z, name).log_softmax(1)
            wanted[:, own] = total + mixed.log_softmax(1)
    torch.testing.assert_close(hybrid, wanted, rtol=1e-4, atol=1e-4)
    # An expert that is not asked leaves the router's posterior among its classes.
    one = routed(model, "hybrid", z, candidates=1, expert_weight=0.3).logits
    asked = router[:, :3].logsumexp(1) > router[:, 3:].logsumexp(1)
    torch.testing.assert_close(one[asked][:, 3:], router[asked][:, 3:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one[asked][:, :3], wanted[asked][:, :3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(routed(model, "hybrid", z, expert_weight=0.0).logits, router)
    torch.testing.assert_close(hybrid.exp().sum(1), torch.ones(len(z)))


def test_oracle_answers_with_the_expert_it_is_told():
    model = with_experts(statistics=False, animals=ANIMALS, skies=SKIES)
    model.base_model.set_router("oracle")
    pixels = torch.randn(4, 3, 8, 8)
    told = torch.tensor([0, 1, 1, 0])
    output = model.route(pixels, expert=told)
    assert torch.equal(output.expert, told)
    own = model.base_model.layer.expert_logits(model.pooled_features(pixels), "skies")
    torch.testing.assert_close(output.logits[1:3, 3:], own[1:3])
    assert (output.logits.argmax(1) >= 3).tolist() == [False, True, True, False]
    with pytest.raises(ValueError, match="is told which expert"):
        model(pixels)
    model.set_router("entropy")
    with pytest.raises(ValueError, match="is told which expert"):
        model.route(pixels, expert=told)


def test_unknown_is_what_is_below_the_threshold():
    model = with_experts(animals=ANIMALS, skies=SKIES)
    for router in (*BY_SCORES, *BY_STATISTICS):
        output = routed(model, router, unknown_below=0.6)
        assert torch.equal(output.unknown, output.confidence < 0.6)
        assert ((output.confidence > 0) & (output.confidence <= 1)).all()
        assert not routed(model, router).unknown.any()
    with pytest.raises(ValueError, match="unknown_below"):
        model.set_router("entropy", unknown_below=2.0)


def test_batch_scope_lets_one_expert_answer_and_warns(monkeypatch):
    model = with_experts(statistics=False, animals=ANIMALS, skies=SKIES)
    with pytest.warns(UserWarning, match="depends on how"):
        output = routed(model, "entropy", routing_scope="batch")
    t = int(output.entropies.mean(0).argmin())
    assert output.expert.tolist() == [t] * 36
    with torch.no_grad():
        z = torch.cat([images_of(name) for name in ("cat", "sun", "oak")])
        scores, _ = model.base_model.layer.scores(z)
    torch.testing.assert_close(output.logits, scores[:, t])
    torch.testing.assert_close(output.entropy, entropy(scores)[:, t])
    with pytest.raises(ValueError, match="scores only"):
        with_experts(animals=ANIMALS).set_router("gaussian", routing_scope="batch")
    with pytest.raises(ValueError, match="routing_scope must be"):
        model.set_router("entropy", routing_scope="dataset")


@pytest.mark.parametrize("router", BY_STATISTICS)
def test_router_and_statistics_come_back_and_are_read_when_needed(tmp_path, router):
    model = with_experts(animals=ANIMALS, skies=SKIES, trees=TREES)
    wanted = routed(model, router, temperature=3.0)
    save_experts(model, tmp_path)
    assert "statistics" not in json.loads((tmp_path / "animals/adapter_config.json").read_text())
    loaded = load_experts(vit(), tmp_path)
    loaded.eval()
    assert loaded.base_model.layer.router == ROUTERS[router]
    with torch.no_grad():
        z = torch.cat([images_of(name) for name in ("cat", "sun", "oak")])
        assert torch.equal(loaded.base_model.layer.route(z).logits, wanted.logits)
    assert torch.equal(routed(copy.deepcopy(loaded), router, temperature=3.0).logits, wanted.logits)
    model.set_router("entropy")
    save_experts(model, tmp_path)
    lazy = load_experts(vit(), tmp_path)
    assert all(part == tmp_path / name for name, part in lazy.base_model.layer.statistics.items())


def test_statistics_need_not_be_published(tmp_path):
    model = with_experts(animals=ANIMALS, skies=SKIES)
    save_experts(model, tmp_path)
    assert (tmp_path / "skies" / STATISTICS_NAME).is_file()
    save_expert(model, "skies", tmp_path / "skies", statistics=False)
    assert not (tmp_path / "skies" / STATISTICS_NAME).exists()
    loaded = load_experts(vit(), tmp_path)
    loaded.set_router("entropy")
    with pytest.raises(ValueError, match=r"'skies' came without.*statistics=True.*'entropy'"):
        loaded.set_router("gaussian")
    assert loaded.base_model.layer.router is entropy
    model.set_router("gaussian")
    with pytest.raises(ValueError, match="statistics=False leaves out"):
        save_experts(model, tmp_path, statistics=False)


def test_statistics_that_are_gone_do_not_keep_an_expert_from_being_saved(tmp_path):
    save_experts(with_experts(animals=ANIMALS, skies=SKIES), tmp_path / "own")
    model = load_experts(vit(), tmp_path / "own")
    name = next(iter(model.base_model.experts))
    (tmp_path / "own" / name / STATISTICS_NAME).write_bytes(b"spoilt")
    with pytest.raises(InvalidExpertError, match="Or save without statistics: statistics=False"):
        save_expert(model, name, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    save_expert(model, name, tmp_path / "again", statistics=False)
    assert (tmp_path / "again" / "adapter_config.json").is_file()


def test_statistics_of_other_references_do_not_mix():
    model = with_experts(animals=ANIMALS, skies=SKIES)
    model.base_model.layer.luca_reference_mean["skies"] += 1.0
    with pytest.raises(ValueError, match="different references"):
        model.set_router("gaussian")


def test_statistics_of_other_classes_are_refused():
    model = with_experts(animals=ANIMALS, skies=SKIES)
    model.base_model.layer.statistics["skies"] = model.base_model.layer.statistics["animals"]
    with pytest.raises(ValueError, match="Collect them anew"):
        model.set_router("gaussian")


def test_refuses_what_does_not_go_together():
    model = with_experts(animals=ANIMALS)
    for router, options in (("gaussian", {"candidates": 3}), ("entropy", {"shrinkage": 0.5}), ("oracle", {"x": 1})):
        with pytest.raises(ValueError, match="does not take these options"):
            model.set_router(router, **options)
    with pytest.raises(ValueError, match="no router called 'best'"):
        model.set_router("best")
    for wrong, match in (
        ({"router": "oracle"}, "told the expert"),
        ({"router": "ridge"}, "statistics_random_features"),
        ({"router": "gaussian", "statistics": False}, "leave statistics"),
        ({"routing_scope": "all"}, "routing_scope must be"),
        ({"statistics_rank": -2}, "statistics_rank"),
    ):
        with pytest.raises(ValueError, match=match):
            ContinualTrainingArguments("out", **wrong)


@pytest.mark.parametrize("router", BY_SCORES)
def test_candidates_are_the_likeliest_experts_and_are_asked_alone(router):
    experts = {"animals": ANIMALS, "skies": SKIES, "trees": TREES}
    model = with_experts(**experts)
    z = torch.cat([images_of(name) for name in ("cat", "sun", "oak")])
    dense, all_three = routed(model, router, z), routed(model, router, z, candidates=7)
    for one, other in zip(dense, all_three, strict=True):
        torch.testing.assert_close(one, other)
    # One candidate: whoever the prototype's posterior says, and the others are not asked.
    one = routed(model, router, z, candidates=1)
    posterior = routed(model, "prototype", z).logits
    # cat is of two experts, so that its images may go to either
    sky, oak = posterior[:, 3:5].exp().sum(1) > 0.5, posterior[:, 5].exp() > 0.5
    assert one.expert[sky].tolist() == [1] * int(sky.sum())
    assert one.expert[oak].tolist() == [2] * int(oak.sum())
    assert int(sky.sum()) > 6
    assert int(oak.sum()) > 6
    assert torch.equal(one.entropies.isfinite().sum(1), torch.ones(len(z)).long())
    scores, _ = model.base_model.layer.scores(z)
    torch.testing.assert_close(one.logits, scores[torch.arange(len(z)), one.expert].detach())
    # Among two, the router's choice; whatever the batch and the order of the experts.
    two = routed(model, router, z, candidates=2)
    costs = ROUTERS[router](scores).masked_fill(~two.entropies.isfinite(), torch.inf)
    assert torch.equal(two.expert, costs.argmin(1))
    alone = torch.cat([routed(model, router, x[None], candidates=2).logits for x in z])
    torch.testing.assert_close(two.logits, alone, rtol=1e-4, atol=1e-4)
    turned = with_experts(**dict(reversed(experts.items())))
    columns = [turned.base_model.classes.index(name) for name in model.base_model.classes]
    other = routed(turned, router, z, candidates=2)
    assert torch.equal(two.expert, 2 - other.expert)
    torch.testing.assert_close(two.logits, other.logits[:, columns])


def test_candidates_follow_the_experts_and_are_saved_with_the_router(out):
    model = with_experts(animals=ANIMALS, skies=SKIES, trees=TREES)
    routed(model, "entropy", candidates=1)
    save_experts(model, out)
    model.delete_adapter("trees")
    never = routed(with_experts(animals=ANIMALS, skies=SKIES), "entropy", candidates=1)
    z = torch.cat([images_of(name) for name in ("cat", "sun", "oak")])
    left = model.base_model.layer.route(z)
    assert torch.equal(left.logits, never.logits)
    loaded = load_experts(vit(), out)
    assert loaded.base_model.layer.router_options == {"candidates": 1}
    again = routed(with_experts(animals=ANIMALS, skies=SKIES, trees=TREES), "entropy", candidates=1)
    torch.testing.assert_close(loaded.base_model.layer.route(z).logits, again.logits)


def test_candidates_and_a_linear_head_stay_finite():
    model = with_experts(animals=ANIMALS, skies=SKIES)
    model.add_adapter("trees", LucaConfig(classes=TREES, reduction=4, head="linear"))
    model.base_model.layer.luca_reference_mean["trees"] += 0.5
    z = torch.cat([images_of(name) for name in TREES])
    model.base_model.collect_statistics("trees", z, torch.arange(2).repeat_interleave(12))
    for count in (1, 2, 3):
        output = routed(model, "entropy", z, candidates=count)
        assert output.logits.isfinite().all()
        assert output.entropy.isfinite().all()


def test_candidates_need_statistics_and_a_router_that_chooses():
    model = with_experts(animals=ANIMALS, skies=SKIES)
    model.set_router("entropy")
    for wrong, match in (
        ({"router": "entropy", "candidates": 0}, "at least 1, got 0"),
        ({"router": "entropy", "candidates": "all"}, "at least 1, got 'all'"),
        ({"router": "entropy", "candidates": 2, "routing_scope": "batch"}, "asks all experts"),
        ({"router": "oracle", "candidates": 2}, "takes no candidates"),
        ({"router": "hybrid", "candidates": 0}, "at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            model.set_router(**wrong)
        assert model.base_model.layer.router is entropy
    without = with_experts(statistics=False, animals=ANIMALS, skies=SKIES)
    with pytest.raises(ValueError, match="'animals', 'skies' came without"):
        without.set_router("entropy", candidates=2)
    assert without.base_model.layer.router is None


def test_a_plain_function_routes():
    model = with_experts(statistics=False, animals=ANIMALS, skies=SKIES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = routed(model, lambda scores, which: (torch.arange(2) != which) * torch.ones(len(scores), 1), which=1)
    assert output.expert.tolist() == [1] * 36


def test_trainer_collects_statistics_and_goes_on_with_them(out):
    trainer = make_trainer(out, router="gaussian", num_train_epochs=1, statistics_rank=3)
    trainer.train()
    for name, classes in trainer.tuner.experts.items():
        kept = ClassStatistics.load(out / name)
        assert kept.classes == classes
        task = next(task for task in trainer.stream if task.name == name)
        train = trainer.features(task, "train")
        x = trainer.tuner.layer.unit_features(train.features.double(), name)
        ids = [trainer.stream.classes.index(c) for c in classes]
        assert kept.counts.tolist() == [int((train.labels == i).sum()) for i in ids]
        torch.testing.assert_close(kept.means, torch.stack([x[train.labels == i].mean(0) for i in ids]))
        assert max(len(factor) for factor in kept.factors) <= 3
    again = make_trainer(out, router="gaussian", num_train_epochs=1, statistics_rank=3)
    again.train()
    assert again.evaluate() == trainer.evaluate()
    with_none = make_trainer(out.parent / "none", num_train_epochs=1, statistics=False)
    with_none.train()
    assert not list((out.parent / "none").rglob(STATISTICS_NAME))


def test_trainer_makes_zeros_with_the_proximal_step(out):
    trainer = make_trainer(out, num_train_epochs=2, l1_proximal=True, l1_weight=0.05)
    trainer.train()
    sparsity = overlap_report(trainer.tuner.layer)["sparsity"]
    assert min(sparsity.values()) > 0.02
    assert max(sparsity.values()) < 1
