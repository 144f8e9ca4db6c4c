"""
The demonstration, used in a real browser as a visitor uses it: `make test-space`. In the tests' own environment gradio
is missing, for it asks for an older Pillow than constraints.txt has.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    pytest.importorskip("gradio", reason="needs gradio: make test-space")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "GRADIO_SERVER_PORT": str(port), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("space") / "log.txt"
    with open(log, "w") as said:
        command = [sys.executable, str(ROOT / "examples" / "space" / "app.py")]
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        try:
            for _ in range(240):
                if "Running on local URL" in log.read_text():
                    break
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-space")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(address, browser):
    """The page of a visitor who has just come."""
    page = browser.new_page(viewport={"width": 1200, "height": 1500})
    page.set_default_timeout(60_000)
    requested = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(address)
    page.wait_for_selector("#table >> text=zero_one")
    yield page
    # Nothing is fetched from elsewhere.
    assert all(url.startswith((address, "data:", "blob:")) for url in requested), requested
    page.close()


def drop(page, digit, tmp_path):
    """Put a digit that was kept back from the training into the page."""
    from PIL.Image import fromarray
    from sklearn.datasets import load_digits

    data = load_digits()
    image = data.images[[i for i, target in enumerate(data.target) if target == digit][-3]]
    fromarray((image * (255 / 16)).astype("uint8")).save(tmp_path / "digit.png")
    page.set_input_files("input[type=file] >> nth=0", tmp_path / "digit.png")
    page.wait_for_selector("#sentence >> text=It says")


def bars(page, name):
    """Of a list of bars: what each stands for, and its per cent."""
    text = page.inner_text(f"#{name}")
    return {label: int(percent) for label, percent in re.findall(r"^(\w+)\s+(\d+)%$", text, re.M)}


def teach_letters(page):
    page.get_by_role("button", name="Take drawn letters A and B").click()
    page.wait_for_function("document.querySelectorAll('.grid-container img, .gallery-item img').length >= 24")
    page.get_by_role("button", name="Teach", exact=True).click()
    page.wait_for_selector("#news >> text=Learnt: A, B")


def test_a_dropped_image_is_answered_with_every_experts_certainty(page, tmp_path):
    drop(page, 0, tmp_path)
    assert "It says “0”" in page.inner_text("#sentence")
    assert "zero_one" in page.inner_text("#sentence")
    certainty = bars(page, "experts")
    assert set(certainty) == {"zero_one", "two_three", "four_five"}
    assert max(certainty, key=certainty.get) == "zero_one"
    page.get_by_label("the most certain expert (entropy, the paper's)").check()
    page.wait_for_function("!document.querySelector('#experts').innerText.includes(' 0%')")
    assert set(bars(page, "experts")) == {"zero_one", "two_three", "four_five"}


def test_a_taught_task_is_known_the_old_answers_stay_and_it_can_be_forgotten(page, tmp_path):
    teach_letters(page)
    news = page.inner_text("#news")
    assert "3 of 3 earlier experts give 150 test digits the scores that they gave before, to the last bit" in news
    alike, right = re.search(r"(\d+) of 150 answers are the same as before; .* (\d+)% are now", news).groups()
    assert int(alike) >= 147
    assert int(right) >= 95
    page.get_by_role("button", name="A.png").or_(page.locator("button:has(img[src*='A.png'])")).first.click()
    page.wait_for_selector("#sentence >> text=It says “A”")
    assert "lesson_1" in page.inner_text("#sentence")
    drop(page, 0, tmp_path)
    page.wait_for_selector("#sentence >> text=It says “0”")

    page.get_by_role("button", name="Forget this expert").click()
    page.wait_for_selector("#news >> text=Forgotten: lesson_1")
    assert "3 of 3 earlier experts" in page.inner_text("#news")
    assert "lesson_1" not in page.inner_text("#table")


def test_what_a_visitor_teaches_is_in_that_visitors_session_alone(page, browser, address):
    teach_letters(page)
    assert "lesson_1" in page.inner_text("#table")
    other = browser.new_page()
    other.goto(address)
    other.wait_for_selector("#table >> text=zero_one", timeout=60_000)
    assert "lesson_1" not in other.inner_text("#table")
    other.close()


def test_what_cannot_be_done_is_said(page):
    page.get_by_role("button", name="Teach", exact=True).click()
    page.wait_for_selector("text=A task needs two classes")
    for name in ("four_five", "two_three"):
        page.get_by_role("button", name="Forget this expert").click()
        page.wait_for_selector(f"#news >> text=Forgotten: {name}")
        page.wait_for_function("name => !document.querySelector('#table').innerText.includes(name)", arg=name)
    page.get_by_role("button", name="Forget this expert").click()
    page.wait_for_selector("text=is the only expert")
