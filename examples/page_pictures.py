"""`make pictures`: the server's page as pictures, `docs/page-*.png`, of a real server under load.

Needs the embedded model `smollm2-135m`, Debian's Chromium, and playwright, which has an environment
of its own: there this file is run again, with the server's URL.
"""
# pyright: reportMissingImports=false

import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
MODEL = "smollm2-135m"
CHROMIUM = "/usr/bin/chromium"
SECONDS = 75  # of load, for the dashboard's lines
CLIENTS = 4
SYSTEM = "You are a helpful assistant. Answer in one short paragraph, in plain words. " * 6
QUESTIONS = ("Why is the sky blue?", "What is a prime number?", "Name three rivers of Europe.")


def main() -> None:
    """Serve, and let the other interpreter look."""
    from nano_inference import EngineConfig
    from nano_inference.models.loading import resolve_model
    from nano_inference.serving.config import ServerConfig
    from nano_inference.serving.main import running_server

    engine = EngineConfig(
        MODEL,
        device="cpu",
        max_model_len=1024,
        max_batch_size=4,
        kv_cache_memory=2**27,
        speculation="suffix",
    )
    python = Path(sys.prefix) / "page" / "bin" / "python"
    served = ServerConfig(port=0, rl=True, served_model_name=MODEL)
    with running_server(engine, served) as url:
        folder = str(resolve_model(MODEL))
        subprocess.run([python, __file__, url, folder], check=True)


def look(url: str, folder: str) -> None:
    """Play in the playground, then watch a load with weight updates."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        desk = {"viewport": {"width": 1180, "height": 700}, "color_scheme": "light"}
        page = browser.new_page(**desk)
        page.goto(url)
        played(page)
        save(page, "playground")
        hand = {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"}
        small = browser.new_page(**hand)
        small.goto(url)
        small.fill("#n", "2")
        played(small)
        small.locator(".sample .token").nth(9).scroll_into_view_if_needed()
        small.locator(".sample .token").nth(9).click()
        save(small, "phone")
        small.close()
        watched = browser.new_page(viewport={"width": 1180, "height": 1180}, color_scheme="dark")
        watched.goto(url + "/#/dashboard")
        watched.locator("#status[data-state=ok]").wait_for()
        load(url, folder, lambda: save(watched, "dashboard"))
        browser.close()


def played(page) -> None:
    page.locator("#pick option").first.wait_for(state="attached")
    page.fill("#prompt", "Why is the sky blue?")
    page.fill("#seed", "7")
    page.fill("#max-tokens", "72")
    page.press("#prompt", "Control+Enter")
    page.locator("#replay:enabled").wait_for(timeout=120_000)
    page.click("#replay")
    page.locator("#said", has_text="replayed").wait_for(timeout=120_000)
    page.locator(".sample .token").nth(12).hover()


def save(page, name: str) -> None:
    file = DOCS / f"page-{name}.png"
    page.screenshot(path=file)
    print(f"{file.name}: {file.stat().st_size // 1024} KB")


def load(url: str, folder: str, look) -> None:
    """Clients that ask with a common beginning; twice meanwhile the weights are updated."""
    until = time.monotonic() + SECONDS

    def client(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < until:
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": chance.choice(QUESTIONS)},
            ]
            tokens, samples = chance.randint(16, 160), chance.randint(1, 3)
            body = {"messages": messages, "max_tokens": tokens, "n": samples, "stream": True}
            post(url + "/v1/chat/completions", body)
            time.sleep(chance.random() * 2)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        time.sleep(SECONDS / 3)
        post(url + "/update_weights_from_disk", {"model_path": folder})
    time.sleep(SECONDS / 3 - 4)
    look()
    for thread in threads:
        thread.join()


def post(url: str, body: dict) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


if __name__ == "__main__":
    look(*sys.argv[1:]) if len(sys.argv) > 1 else main()
