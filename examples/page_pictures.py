"""`make pictures`: screenshots of the server's page, `docs/page-*.png`, from a real server under load.

Requires the embedded model `smollm2-135m`, Debian's Chromium, and playwright in a separate
environment, in which this file runs again with the server's URL.
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
SECONDS = 75  # seconds of load, for the dashboard's lines
SECONDS_BEFORE_END = 6
CLIENTS = 4
SYSTEM = "You are a helpful assistant. Answer in one short paragraph, in plain words. " * 6
QUESTIONS = ("Why is the sky blue?", "What is a prime number?", "Name three rivers of Europe.")


def main() -> None:
    """Start a server and run the browser with the other interpreter."""
    from nano_inference import EngineConfig
    from nano_inference.checkpoints.loading import resolve_model
    from nano_inference.server.config import ServerConfig
    from nano_inference.server.main import running_server

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
    """Take pictures of a chat, of samples, and of a load with weight updates."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        desk = {"viewport": {"width": 1180, "height": 700}, "color_scheme": "light"}
        page = browser.new_page(**desk)
        page.goto(url)
        chatted(page)
        save(page, "chat")
        sampled(page)
        save(page, "samples")
        hand = {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"}
        small = browser.new_page(**hand)
        small.goto(url)
        sampled(small, samples=2)
        small.locator(".sample .token").nth(9).scroll_into_view_if_needed()
        small.locator(".sample .token").nth(9).click()
        save(small, "phone")
        small.close()
        watched = browser.new_page(viewport={"width": 1180, "height": 1180}, color_scheme="dark")
        watched.goto(url + "/#/dashboard")
        watched.locator("#status[data-state=ok]").wait_for()
        load(url, folder, lambda: save(watched, "dashboard"))
        browser.close()


def chatted(page) -> None:
    page.locator("#status[data-state=ok]").wait_for()
    page.click("#chat-settings > summary")
    page.fill("#chat-temperature", "0")
    page.fill("#chat-max_tokens", "160")
    page.click("#chat-settings > summary")
    page.fill("#message", "Write a Python function that reverses a string.")
    page.press("#message", "Enter")
    page.locator(".message .tools", has_text="Regenerate").wait_for(timeout=120_000)
    page.locator("#send").wait_for()
    page.evaluate("scrollTo(0, 0)")


def sampled(page, samples: int = 3) -> None:
    page.locator("#status[data-state=ok]").wait_for()
    page.click("nav a[href='#/samples']")
    page.click("#samples-settings > summary")
    page.fill("#samples-n", str(samples))
    page.fill("#samples-temperature", "0.8")
    page.fill("#samples-seed", "7")
    page.fill("#samples-max_tokens", "72")
    page.click("#samples-settings > summary")
    page.fill("#prompt", "Why is the sky blue?")
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
    """Send requests with a shared prefix, and update the weights twice meanwhile."""
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
    for third in (2, 1):
        time.sleep(max(until - time.monotonic() - third * SECONDS / 3, 0))
        post(url + "/update_weights_from_disk", {"model_path": folder})
    time.sleep(max(until - time.monotonic() - SECONDS_BEFORE_END, 0))
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
