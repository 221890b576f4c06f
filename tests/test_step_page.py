"""docs/step.html in a real browser: its numbers are the planner's, and it is usable by keyboard alone."""
import itertools
import json
import shutil

import pytest
import torch
from conftest import REPO

from nanochat.flops import datasheet_peak
from nanochat.gpt import config_from_depth
from nanochat.plan.machines import LINKS, Cluster, Layout, plan_step
from nanochat.plan.memory import parameter_counts, state_bytes

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: . ./setup.sh dev")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH: apt install chromium")


@pytest.fixture(scope="module")
def page():
    complaints = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if "://" in request.url[5:] else None)
        page.goto((REPO / "docs" / "step.html").as_uri())
        yield page
        browser.close()
    assert complaints == []  # no error, no request to anybody


def test_its_numbers_are_the_planners(page):
    """Every stage, on one and several hosts, copies shared by all and by a host, fast and slow links: to ten digits."""
    places = [(1, 1), (1, 8), (2, 4), (8, 1), (4, 8)]
    links = [("nvlink4", "ndr"), ("pcie4", "eth10")]
    for depth, stage, (hosts, per_host), share, micro_steps, (within, between) in itertools.product(
            (4, 24), range(4), places, ("by all", "on each host"), (1, 4), links):
        ranks, config = hosts * per_host, config_from_depth(depth, 65536, 2048, arch="modern")
        shards = 1 if stage == 0 else ranks if share == "by all" else per_host
        cluster = Cluster(ranks, per_host, LINKS[within], LINKS[between])
        batch = 8 * 2048 * micro_steps * ranks
        expected = plan_step(
            config, cluster, Layout(stage, shards, 8, micro_steps), datasheet_peak("H100") / 2, torch.bfloat16, batch)
        choice = {"stage": stage, "hosts": hosts, "perHost": per_host, "share": share, "microSteps": micro_steps,
                  "rows": 8, "depth": depth, "within": within, "between": between}
        found = page.evaluate("choice => plan(settled(choice))", choice)
        numbers = [found[name] for name in ("seconds", "within", "between")]
        assert numbers == pytest.approx([expected.seconds, expected.within, expected.between], rel=1e-10), choice
        kept = state_bytes(stage, shards, torch.bfloat16, *parameter_counts(config))
        assert list(found["holds"].values()) == pytest.approx(list(kept), rel=1e-10), choice


def test_what_happens_by_keyboard(page):
    """Stage 2 on 2 x 4 GPUs with two micro-steps: seven moments, of which both backward passes send gradients."""
    page.reload()
    title, says = page.locator("#title"), page.locator("#says")
    titles, sends = [], []
    page.keyboard.press("Home")
    for _ in range(7):
        titles.append(title.inner_text().partition(" · ")[2])
        sends.append([line.partition(":")[0] for line in says.inner_text().splitlines() if "a rank sends" in line])
        page.keyboard.press("ArrowRight")
    passes = [f"micro-step {i} of 2: {name} pass" for i in (1, 2) for name in ("forward", "backward")]
    assert titles == [*passes, "one small all-reduce", "AdamW", "Muon"]
    gradients = ["reduce-scatter of gradients"]
    assert sends == [["all-gather of parameters"], gradients, [], gradients, [], [], ["all-to-all of matrices"]]
    assert title.inner_text().startswith("7 of 7") and page.get_by_label("the next moment").is_disabled()
    for name, option in (("stage", "0"), ("hosts", "1"), ("perHost", "1")):
        page.locator(f"select[name={name}]").select_option(option)
    assert "Every rank orthogonalizes every matrix" in says.inner_text()
    assert "a rank sends" not in says.inner_text()


def test_every_choice_can_be_shown(page):
    """Each option of each setting, moment by moment, without an error; eight of many ranks are drawn."""
    for name in page.evaluate("Object.keys(CHOICES)"):
        for option in page.evaluate(f"CHOICES[{json.dumps(name)}][1].map(String)"):
            page.locator(f"select[name={name}]").select_option(option)
            page.evaluate("() => { for (let i = 0; i < 20; i++) go(-1); for (let i = 0; i < 20; i++) go(1); }")
    page.locator("select[name=hosts]").select_option("8")
    page.locator("select[name=perHost]").select_option("8")
    drawn = page.locator("#ranks").text_content()
    assert drawn.count("rank ") == 8 and "and 56 more" in drawn
