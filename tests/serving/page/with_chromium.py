"""What Debian's Chromium makes of the page, by playwright; its own interpreter runs this: `python
with_chromium.py URL LOOK`. The last line that it prints is JSON of what was seen.

Where something is to happen meanwhile it prints what, and waits for a line.
"""
# pyright: reportMissingImports=false

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
PATIENCE = 60_000  # ms


def let(what: str) -> None:
    """Let the test do something."""
    print(what, flush=True)
    input()


def until(page: Page, condition: str) -> None:
    """Wait for it. Playwright's own waiting makes code of a string in the page, which the page's
    policy refuses.
    """
    ends = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < ends, condition
        page.wait_for_timeout(50)


def sample(page: Page, prompt: str, *, mode: str = "raw", n: int = 3, seed: str = "7") -> None:
    """Sample, and wait for the end."""
    page.select_option("#mode", mode)
    page.fill("#prompt", prompt)
    page.fill("#n", str(n))
    page.fill("#max-tokens", "12")
    page.fill("#seed", seed)
    page.press("#prompt", "Control+Enter")
    ended(page, n)


def ended(page: Page, n: int) -> None:
    until(page, f"document.querySelectorAll('.sample').length === {n}")
    until(page, "document.getElementById('stop').disabled")


def texts(page: Page) -> list[list[str]]:
    """Of each column its tokens."""
    return [each.locator(".token").all_text_contents() for each in page.locator(".sample").all()]


def tokens(page: Page) -> dict[str, Any]:
    sample(page, "The sky is blue because")
    token = page.locator(".sample .token").nth(2)
    tints = page.eval_on_selector_all(
        ".token", "all => all.map(each => getComputedStyle(each).backgroundColor)"
    )
    token.hover()
    hovered = page.locator("#tip").inner_text()
    page.mouse.move(0, 0)
    left = page.locator("#tip").is_hidden()
    page.locator(".sample .token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    focused = page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    return {
        "columns": texts(page),
        "tints": len(set(tints)),
        "hovered": hovered,
        "left": left,
        "focused": focused,
        "alternatives": page.locator("#tip tr").count(),
        "closed": page.locator("#tip").is_hidden(),
        "feet": page.locator(".sample .note").all_text_contents(),
    }


def chat(page: Page) -> dict[str, Any]:
    sample(page, "What is the capital of France?", mode="chat", n=1)
    return {"columns": texts(page), "problem": page.locator("#problem").inner_text()}


def replay(page: Page) -> dict[str, Any]:
    sample(page, "Once upon a time", seed="")  # one is drawn
    before, said = texts(page), page.locator("#said").inner_text()
    page.click("#replay")
    ended(page, 3)
    until(page, "document.getElementById('said').textContent.includes('replayed')")
    again = page.locator("#said").inner_text()
    let("change")
    page.click("#replay")
    ended(page, 3)
    until(page, "document.getElementById('said').textContent.includes('weights')")
    return {
        "before": before,
        "said": said,
        "again": again,
        "changed": page.locator("#said").inner_text(),
    }


def stop(page: Page) -> dict[str, Any]:
    page.select_option("#mode", "raw")
    page.fill("#max-tokens", "100000")
    page.press("#prompt", "Control+Enter")
    page.locator(".token").first.wait_for()
    page.click("#stop")
    until(page, "document.getElementById('said').textContent.includes('stopped')")
    return {"columns": texts(page), "run": page.locator("#run").is_enabled()}


def versions(page: Page) -> dict[str, Any]:
    sample(page, "The sky is blue because")
    page.click("nav a[href='#/dashboard']")
    until(page, "document.getElementById('version').textContent === '0'")
    let("change")
    until(page, "document.getElementById('version').textContent === '1'")
    page.locator("#throughput line.mark").wait_for(state="attached")
    return {
        "mark": page.locator("#throughput g.mark").all_text_contents(),
        "tiles": page.locator(".tiles").inner_text(),
        "blocks": page.locator("#kv").get_attribute("aria-label"),
        "cells": page.locator("#kv rect").count(),
        "phases": page.locator("#phases").get_attribute("aria-label"),
        "first": page.locator("#first-note").inner_text(),
        "between": page.locator("#between rect").count(),
        "whole": page.locator("#whole rect").count(),
        "drafts": page.locator("#drafts").inner_text(),
    }


def restart(page: Page) -> dict[str, Any]:
    page.click("nav a[href='#/dashboard']")
    page.locator("#status[data-state=ok]").wait_for()
    until(page, "document.querySelectorAll('#load polyline').length === 2")
    let("kill")
    until(page, "document.getElementById('status').textContent === 'reconnecting…'")
    page.wait_for_timeout(1500)
    while_gone = page.locator("#running").inner_text(), page.locator("#load polyline").count()
    let("start")
    page.locator("#status[data-state=ok]").wait_for()
    until(page, "document.querySelectorAll('#load polyline').length === 4")
    return {"gone": while_gone}


def begun(page: Page) -> None:
    """Two long samples, ten tokens of each."""
    page.select_option("#mode", "raw")
    page.fill("#prompt", "Once upon a time there was a")
    page.fill("#n", "2")
    page.fill("#max-tokens", "160")
    page.fill("#seed", "7")
    page.press("#prompt", "Control+Enter")
    until(page, "document.querySelectorAll('.sample').length === 2")
    for place in (0, 1):
        until(page, f"document.querySelectorAll('.text')[{place}].childElementCount > 10")


def cut(page: Page) -> dict[str, Any]:
    """What is seen when the stream has ended too early, with the server's state from then on."""
    page.locator("#problem").wait_for()
    until(page, "document.getElementById('status').dataset.state !== 'ok'")
    return {
        "columns": texts(page),
        "problem": page.locator("#problem").inner_text(),
        "status": page.locator("#status").inner_text(),
        "feet": page.locator(".sample .note").all_text_contents(),
    }


def replayed(page: Page) -> dict[str, Any]:
    """The server is there again."""
    page.locator("#status[data-state=ok]").wait_for()
    page.click("#replay")
    ended(page, 2)
    until(page, "document.getElementById('said').textContent.includes('replayed')")
    return {
        "said": page.locator("#said").inner_text(),
        "again": texts(page),
        "healed": page.locator("#problem").is_hidden(),
    }


def killed(page: Page) -> dict[str, Any]:
    begun(page)
    let("kill")
    seen = cut(page)
    page.fill("#prompt", "Is there anybody?")
    page.press("#prompt", "Control+Enter")
    until(page, "document.getElementById('problem').textContent.includes('cannot be reached')")
    until(page, "document.getElementById('stop').disabled")
    kept = texts(page)
    let("start")
    return seen | {"kept": kept} | replayed(page)


def engine_killed(page: Page) -> dict[str, Any]:
    begun(page)
    let("kill")
    return cut(page) | replayed(page)


def hostile(page: Page) -> dict[str, Any]:
    seen = {}
    for mode in ("raw", "chat"):
        sample(page, "<script>alert(1)</script><img src=x onerror=alert(2)>", mode=mode, n=2)
        page.locator(".token").first.hover()
        seen[mode] = ["".join(column) for column in texts(page)]
    inside = "#columns script, #columns img, #tip script, #tip img, #problem *"
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } }"
    )
    return seen | {"elements": page.locator(inside).count(), "refused": refused}


def keys(page: Page) -> dict[str, Any]:
    page.locator("#key-dialog[open]").wait_for()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.locator("#key-dialog[open]").wait_for()
    locked = page.locator("#status").inner_text()
    until(page, "!document.getElementById('key').value")
    page.fill("#key", "right")
    page.keyboard.press("Enter")
    page.locator("#status[data-state=ok]").wait_for()
    sample(page, "Hello", n=1)
    kept = page.evaluate("[Object.values({...sessionStorage}), {...localStorage}, document.cookie]")
    return {"locked": locked, "columns": texts(page), "kept": kept}


def phone(page: Page) -> dict[str, Any]:
    page.set_viewport_size({"width": 390, "height": 844})
    sample(page, "The sky is blue because")
    wide = []
    for view in ("#/playground", "#/dashboard"):
        page.click(f"nav a[href='{view}']")
        page.wait_for_timeout(300)
        wide.append(page.evaluate("document.documentElement.scrollWidth"))
    page.click("nav a[href='#/playground']")
    page.locator(".sample .token").nth(1).click()
    box = page.locator("#tip").bounding_box()
    assert box is not None
    return {"wide": wide, "tip": [box["x"], box["x"] + box["width"]]}


LOOKS: dict[str, Callable[[Page], dict[str, Any]]] = {
    look.__name__: look
    for look in (
        *(tokens, chat, replay, stop, versions, restart, killed, engine_killed),
        *(hostile, keys, phone),
    )
}


def main(url: str, name: str) -> None:
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(reduced_motion="reduce")
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda problem: problems.append(str(problem)))
        page.on("dialog", lambda dialog: problems.append(f"a dialog: {dialog.message}"))
        page.on(
            "console",
            lambda message: (
                problems.append(message.text) if "Content Security Policy" in message.text else None
            ),
        )
        page.goto(url)
        if name != "keys":
            page.locator("#pick option").first.wait_for(state="attached")
        seen = LOOKS[name](page)
        browser.close()
    print(json.dumps(seen | {"problems": problems}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
