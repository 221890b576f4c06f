"""docs/step.html in a real browser: its numbers are the planner's, and a keyboard is enough."""
import itertools
import re
import shutil
import statistics

import pytest
import torch
from conftest import REPO

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.machines import LINKS, Cluster, Layout, plan_step
from nanochat.plan.memory import split_into_stages, state_bytes
from nanochat.runtime.flops import datasheet_peak

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


def compare_with_the_planner(page, depth: int, stage: int, stages: int, hosts: int, per_host: int, share: str,
                             micro_steps: int, within: str, between: str) -> float:
    ranks, config = hosts * per_host // stages, config_from_depth(depth, 65536, 2048, arch="modern")
    shards = 1 if stage == 0 else ranks if share == "by all" else min(per_host, ranks)
    cluster = Cluster(hosts * per_host, per_host, LINKS[within], LINKS[between])
    layout = Layout(stage, shards, 8, micro_steps, pipeline_stages=stages)
    expected = plan_step(
        config, cluster, layout, datasheet_peak("H100") / 2, torch.bfloat16, 8 * 2048 * micro_steps * ranks)
    choice = {"stage": stage, "pipeline": stages, "hosts": hosts, "perHost": per_host, "share": share,
              "microSteps": micro_steps, "rows": 8, "depth": depth, "within": within, "between": between}
    found = page.evaluate("choice => refusal(settled(choice)) || plan(settled(choice))", choice)
    numbers = [found["seconds"] - found["bubble"], found["within"], found["between"]]
    wanted = [expected.seconds - expected.bubble, expected.within, expected.between]
    assert numbers == pytest.approx(wanted, rel=1e-10, abs=1e-12), choice
    # The page runs the schedule pass by pass; the planner's formula is exact where the slowest stage never waits.
    assert found["seconds"] == pytest.approx(expected.seconds, rel=1e-10 if stages == 1 else 0.22), choice
    states = [state_bytes(stage, shards, torch.bfloat16, s.adamw, s.muon) for s in split_into_stages(config, stages)]
    kept = max(states, key=sum)
    assert list(found["holds"].values()) == pytest.approx(list(kept), rel=1e-10), choice
    return expected.seconds / found["seconds"]


def test_its_numbers_are_the_planners(page):
    """Every stage, on one and several hosts, copies shared by all and by a host, fast and slow links: to ten digits."""
    places = [(1, 1), (1, 8), (2, 4), (8, 1), (4, 8)]
    links = [("nvlink4", "ndr"), ("pcie4", "eth10")]
    for depth, stage, place, share, micro_steps, ends in itertools.product(
            (4, 24), range(4), places, ("by all", "on each host"), (1, 4), links):
        compare_with_the_planner(page, depth, stage, 1, *place, share, micro_steps, *ends)


def test_its_numbers_of_pipelines_are_the_planners(page):
    """Pipelines within a host and over hosts, of single ranks and of groups: half of them to a thousandth."""
    ratios = []
    places = [(1, 8), (2, 4), (8, 1), (4, 8)]
    for depth, stage, stages, place, share, ends in itertools.product(
            (12, 32), (0, 1), (2, 4, 8), places, ("by all", "on each host"), [("nvlink4", "ndr"), ("pcie4", "eth10")]):
        ratios.append(compare_with_the_planner(page, depth, stage, stages, *place, share, 8, *ends))
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < 1e-3


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


def test_an_address_is_a_question(page):
    """Pages link to a rank and a moment; what is chosen stands in the address; an address that cannot be says why."""
    def ask(question: str) -> tuple[str, str]:
        page.goto((REPO / "docs" / "step.html").as_uri() + "#" + question)
        return page.locator("#title").inner_text(), page.locator("#says").inner_text()

    title, says = ask("hosts=1&perHost=8&stage=2&microSteps=4&rank=3&at=backward-3")
    assert title == "6 of 11 · micro-step 3 of 4: backward pass"
    assert "Rank 3, on host 0: it owns part 4 of 8 of each unit; ranks 0, 1, … 7 share a copy." in says
    page.keyboard.press("ArrowRight")
    page.locator("select[name=stage]").select_option("1")
    assert page.evaluate("location.hash") == "#stage=1&hosts=1&perHost=8&microSteps=4&rank=3&at=forward-4"
    page.reload()
    assert page.locator("#title").inner_text() == "7 of 11 · micro-step 4 of 4: forward pass"
    # as in the first table of docs/machines.md
    assert "; ranks 4, 5, 6, 7 share a copy; ranks 3, 7 add up its gradients." in ask("share=on+each+host&rank=7")[1]
    for question, answer in (("stage=7", "expected one of 0, 1, 2, 3."), ("ranks=8", "a name among stage, pipeline"),
                             ("at=backward-9", "expected one of forward-1, "), ("rank=8", "ranks are 0 to 7.")):
        title, says = ask(question)
        assert title == "This cannot be run" and says.startswith(question) and answer in says
    links = {link for path in REPO.glob("docs/*.md") for link in re.findall(r"step\.html#([^)]+)\)", path.read_text())}
    assert len(links) > 2 and [link for link in links if "cannot" in ask(link)[0]] == []
