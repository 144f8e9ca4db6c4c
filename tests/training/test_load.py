"""Many experts, many rounds, many threads: nothing grows that should not, and nothing is lost."""

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import expert_config, logits, pictures, tiny_vit, weights, with_experts

from peft_luca import load_experts, save_experts


pytestmark = pytest.mark.filterwarnings("ignore:Adapter .* was active:UserWarning")
THREADS = 8


def memory():
    """Bytes of this process's own memory."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def with_statistics(model, seed=0, **options):
    """Statistics of made features for every expert, so that every router can be set."""
    generator = torch.Generator().manual_seed(seed)
    for name, classes in model.base_model.experts.items():
        labels = torch.arange(len(classes)).repeat(4)
        features = torch.randn(len(labels), model.base_model.layer.width, generator=generator)
        model.base_model.collect_statistics(name, features, labels, **options)
    return model


# --- threads ---


def at_once(work):
    """What `work(i)` gives in each of eight threads that begin together."""
    gate, found, failed = threading.Barrier(THREADS), {}, []

    def run(i):
        gate.wait()
        try:
            found[i] = work(i)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    return [found[i] for i in range(THREADS)]


def experts(count=6):
    return with_experts(None, **{f"e{i}": [f"{i}a", f"{i}b", "shared"] for i in range(count)})


@pytest.mark.parametrize(("router", "options"), [("energy", {"temperature": 2.0}), ("gaussian", {}), ("ridge", {})])
def test_eight_threads_route_as_one_does(router, options):
    model = with_statistics(experts(), random_features=20)
    batches = [pictures(3, seed=i) for i in range(THREADS)]
    model.set_router(router, **options)
    alone = [model.route(batch) for batch in batches]
    for _ in range(5):
        # What is made ready at the first call is made anew, by all threads at once.
        model.base_model.layer._experts = None
        for one, other in zip(alone, at_once(lambda i: model.route(batches[i])), strict=True):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_router_is_made_ready_once_for_all_threads(monkeypatch, tmp_path):
    """Statistics of thousands of classes are gigabytes: not eight times."""
    made = []
    real = torch.linalg.eigh
    model = with_statistics(experts())
    save_experts(model, tmp_path)
    model = load_experts(tiny_vit(), tmp_path)
    model.set_router("gaussian")
    model.base_model.layer._experts = None
    monkeypatch.setattr(torch.linalg, "eigh", lambda *args: made.append(time.sleep(0.05)) or real(*args))
    at_once(lambda i: model.route(pictures(1)))
    assert len(made) == 1


def test_threads_that_name_experts_that_do_not_and_that_read_features():
    model = experts()
    model.set_router("entropy")
    names, batches = list(model.base_model.experts), [pictures(2, seed=i) for i in range(THREADS)]

    def ask(i):
        if i % 3 == 2:
            return model.base_model.pooled_features(batches[i])
        return logits(model, batches[i], **({"adapter_names": [names[i % 6]] * 2} if i % 3 else {}))

    alone = [ask(i) for i in range(THREADS)]
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(alone, at_once(ask), strict=True))


# --- rounds ---


def test_an_expert_that_comes_and_goes_leaves_nothing():
    model = experts(2)
    before, names = logits(model), list(model.state_dict())
    for i in range(20):
        model.add_adapter(f"guest{i}", expert_config(["x", f"y{i}"]))
        model.set_router("entropy")
        model.route(pictures(1))
        model.delete_adapter(f"guest{i}")
    model.set_adapter("e0")
    assert list(model.state_dict()) == names
    assert list(model.peft_config) == list(model.base_model.experts) == ["e0", "e1"]
    assert torch.equal(logits(model), before)


@pytest.mark.slow
def test_ten_thousand_rounds_take_no_memory(record_property):
    model = experts(2)
    model.set_router("entropy")
    before = weights(model)

    def rounds(count):
        for i in range(count):
            model.add_adapter(f"guest{i}", expert_config([f"x{i}", f"y{i}"]))
            model.delete_adapter(f"guest{i}")

    rounds(500)
    start = memory()
    rounds(9500)
    grown = memory() - start
    record_property("add_delete_rounds", 10_000)
    record_property("add_delete_grown_bytes", grown)
    assert grown < 8 * 2**20
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.slow
def test_fifty_thousand_calls_take_no_memory(record_property):
    model = with_statistics(experts())
    model.set_router("gaussian")
    batches = [pictures(1, seed=i) for i in range(16)]
    first = [model.route(batch).logits for batch in batches]

    def calls(count):
        for i in range(count):
            model.route(batches[i % 16])

    calls(2000)
    start = memory()
    calls(50_000)
    grown = memory() - start
    record_property("route_calls_gaussian", 50_000)
    record_property("route_grown_bytes_gaussian", grown)
    assert grown < 8 * 2**20
    assert all(torch.equal(model.route(b).logits, wanted) for b, wanted in zip(batches, first, strict=True))


# --- a thousand experts ---


@pytest.mark.slow
def test_a_thousand_experts_of_a_hundred_classes(tmp_path, record_property):
    seconds = {}

    def timed(what, act):
        started = time.perf_counter()
        done = act()
        seconds[what] = round(time.perf_counter() - started, 2)
        return done

    names = [f"e{i}" for i in range(1000)]
    model = with_experts(None, e0=[f"0 {k}" for k in range(100)])

    def add():
        for i in range(1, 1000):
            model.add_adapter(names[i], expert_config([f"{i} {k}" for k in range(100)]))

    timed("add", add)
    assert len(model.base_model.classes) == 100_000
    timed("save", lambda: save_experts(model, tmp_path))
    model.set_router("entropy")
    x = pictures(3)
    routed = timed("route", lambda: model.route(x))
    assert routed.logits.shape == (3, 100_000)
    assert routed.entropies.shape == (3, 1000)
    assert routed.logits.isfinite().all()
    assert torch.equal(routed.entropies.argmin(dim=1), routed.expert)
    loaded = timed("load", lambda: load_experts(tiny_vit(), tmp_path))
    loaded.set_router("entropy")
    again = loaded.route(x)
    assert all(torch.equal(a, b) for a, b in zip(routed, again, strict=True))
    kept = [names[int(i)] for i in routed.expert.unique()]

    def delete():
        for name in names:
            if name not in kept:
                loaded.delete_adapter(name)

    timed("delete", delete)
    assert set(loaded.base_model.experts) == set(kept)
    own = with_experts(tiny_vit(), **{name: [f"{name[1:]} {k}" for k in range(100)] for name in kept})
    own.load_state_dict(loaded.state_dict())
    own.set_router("entropy")
    assert torch.equal(own.route(x).logits, loaded.route(x).logits)  # as if the others had never been there
    record_property("experts", 1000)
    record_property("classes", 100_000)
    record_property("seconds", seconds)
