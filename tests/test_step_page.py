"""docs/step.html in a real browser: its numbers are the planner's, its address is a question."""
import itertools
import re
import statistics

import pytest
import torch
from conftest import REPO
from test_ui import CHROMIUM, browser  # noqa: F401

from bench.machines import LINKS, Cluster, Layout, plan_step, split_into_stages
from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.memory import state_bytes
from nanochat.runtime.flops import datasheet_gpu

STEP_PAGE = (REPO / "docs/step.html").as_uri()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH: apt install chromium")


@pytest.fixture(scope="module")
def page(browser):  # noqa: F811
    complaints = []
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if "://" in request.url[5:] else None)
    page.goto(STEP_PAGE)
    yield page
    assert complaints == []  # no error, no request to anybody


def test_its_numbers_are_the_planners(page):
    """
    Every stage, pipelines of single ranks and of groups, copies shared by all and by a host, fast and slow links: to
    ten digits. The page runs a pipeline's schedule pass by pass; the planner's formula is exact where the slowest stage
    never waits, so half of them agree to a thousandth.
    """
    places, shares, links = [(1, 8), (2, 4), (8, 1), (4, 8)], ("by all", "on each host"), [
        ("nvlink4", "ndr"), ("pcie4", "eth10")]
    off = []
    for depth, stage, stages, (hosts, per_host), share, micro_steps, (within, between) in itertools.chain(
            itertools.product((4, 24), range(4), (1,), [(1, 1), *places], shares, (1, 4), links),
            itertools.product((12, 32), (0, 1), (2, 4, 8), places, shares, (8,), links)):
        ranks, config = hosts * per_host // stages, config_from_depth(depth, 65536, 2048, arch="modern")
        shards = 1 if stage == 0 else ranks if share == "by all" else min(per_host, ranks)
        cluster = Cluster(hosts * per_host, per_host, LINKS[within], LINKS[between])
        layout = Layout(stage, shards, 8, micro_steps, pipeline_stages=stages)
        expected = plan_step(config, cluster, layout, datasheet_gpu("H100").peak / 2)
        choice = {"stage": stage, "pipeline": stages, "hosts": hosts, "perHost": per_host, "share": share,
                  "microSteps": micro_steps, "rows": 8, "depth": depth, "within": within, "between": between}
        found = page.evaluate("choice => refusal(settled(choice)) || plan(settled(choice))", choice)
        numbers = [found["seconds"] - found["bubble"], found["within"], found["between"]]
        wanted = [expected.seconds - expected.bubble, expected.within, expected.between]
        assert numbers == pytest.approx(wanted, rel=1e-10, abs=1e-12), choice
        assert found["seconds"] == pytest.approx(expected.seconds, rel=1e-10 if stages == 1 else 0.22), choice
        states = [state_bytes(stage, shards, torch.bfloat16, part.counts.adamw, part.counts.muon)
                  for part in split_into_stages(config, stages)]
        assert list(found["holds"].values()) == pytest.approx(list(max(states, key=sum)), rel=1e-10), choice
        if stages > 1:
            off.append(abs(expected.seconds / found["seconds"] - 1))
    assert statistics.median(off) < 1e-3


def test_an_address_is_a_question(page):
    """Pages link to a rank and a moment; what is chosen stands in the address; an address that cannot be says why."""
    def ask(question: str) -> str:
        page.goto(f"{STEP_PAGE}#{question}")
        return "\n".join(page.locator("#title, #says").all_inner_texts())

    links = re.findall(r"step\.html#([^)]+)", "".join(path.read_text() for path in REPO.glob("docs/*.md")))
    assert len(links) > 2 and not any("cannot" in ask(link) for link in links)
    # as in the first table of docs/machines.md
    assert "ranks 4, 5, 6, 7 share a copy; ranks 3, 7 add up its gradients." in ask("share=on+each+host&rank=7")
    for wrong in ("stage=7", "ranks=8", "at=backward-9", "rank=8"):
        assert "cannot be run" in ask(wrong) and wrong.partition("=")[0] in ask(wrong)
    ask("hosts=1&perHost=8&microSteps=4&rank=3&at=backward-3")
    page.keyboard.press("ArrowRight")
    assert page.locator("#title").inner_text() == "7 of 11 · micro-step 4 of 4: forward pass"
    page.locator("select[name=stage]").select_option("1")
    assert page.url.endswith("#stage=1&hosts=1&perHost=8&microSteps=4&rank=3&at=forward-4")
