"""
The pictures of the pages, made anew, in a minute. Each says what it was made from; test_runs.py finds older ones.

    bash speedrun.sh --folder=docs/notes    # leaves the base folder that they show
    python tests/pictures.py
"""
import io
import sys
import tomllib
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from nanochat.runtime.files import base_dir, sha256

REPO = Path(__file__).parents[1]
PICTURES = tomllib.loads((REPO / "tests/pictures.toml").read_text())
SERVER = "scripts.chat_web --watch --port=0 --device_type=cpu --library=notes --temperature=0"


def made_from(name: str) -> str:
    """Hashes of the files that a picture shows."""
    return " ".join(sha256(REPO / path) for path in PICTURES[name]["shows"])


def save(name: str, png: bytes) -> None:
    text = PngInfo()
    text.add_text("made from", made_from(name))
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize()
    image.save(REPO / f"docs/images/{name}.png", pnginfo=text, optimize=True)


def main(browser, server: str) -> None:
    from test_ui import Visit

    save("speedrun", (base_dir() / "report/base_train.png").read_bytes())
    me = Visit(browser, f"file://{REPO}/docs/step.html", "", viewport={"width": 1000, "height": 900})
    for name, picture in PICTURES.items():
        if "part" in picture:
            me.page.goto(f"{me.server}#{picture['address']}")
            save(name, me.page.locator(picture["part"]).screenshot())
    me.leave()

    me = Visit(browser, f"{server}#training", "", viewport={"width": 1200, "height": 760})
    me.page.get_by_role("button", name="Mid-training").click()
    save("watch", me.page.screenshot())
    me = Visit(browser, f"{server}#chat", "", viewport={"width": 820, "height": 760})
    for question in "How many r's are in strawberry?", "How much is the rent?", "What is the password of the attic?":
        me.ask(question)
    # The rate of this machine, which may be busy, is left out.
    me.page.evaluate("document.querySelectorAll('.note').forEach(note => note.replaceChildren())")
    me.answers.locator("summary").last.click()
    save("chat", me.page.screenshot())
    me.button("Look inside").last.click()
    me.page.mouse.wheel(0, 1000)
    save("inside", me.page.screenshot())


if __name__ == "__main__":
    from test_ui import launch, serving, sync_api

    with sync_api.sync_playwright() as playwright, serving([sys.executable, "-m", *SERVER.split()]) as server:
        main(launch(playwright), server)
