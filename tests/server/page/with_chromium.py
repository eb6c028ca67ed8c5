"""Drive the page in Debian's Chromium by playwright: `python with_chromium.py URL LOOK`.

A separate interpreter runs this script. Its last line of output is JSON of the observations. To
request an action of the test it prints the action's name and waits for a line.
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
    """Request an action of the test and wait for it."""
    print(what, flush=True)
    input()


def until(page: Page, condition: str) -> None:
    """Wait for a condition. Playwright's own wait evaluates a string, which the page's policy
    rejects.
    """
    ends = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < ends, condition
        page.wait_for_timeout(50)


def sampling(page: Page, prompt: str, **settings: str) -> None:
    """Fill in the view Samples. Settings have the names of its form."""
    page.click("nav a[href='#/samples']")
    if not page.locator("#samples-max_tokens").is_visible():
        page.click("#samples-settings > summary")
    page.select_option("#mode", settings.pop("mode", "raw"))
    page.fill("#prompt", prompt)
    for name, value in settings.items():
        page.fill(f"#samples-{name}", value)


def sample(page: Page, prompt: str, *, n: int = 3, seed: str = "7", **settings: str) -> None:
    """Start sampling and wait for the end."""
    fields = {"max_tokens": "12", "temperature": "0.8", "top_p": "1"} | settings
    sampling(page, prompt, n=str(n), seed=seed, **fields)
    page.press("#prompt", "Control+Enter")
    ended(page, n)


def ended(page: Page, n: int) -> None:
    until(page, f"document.querySelectorAll('.sample').length === {n}")
    until(page, "document.getElementById('stop').disabled")


def texts(page: Page) -> list[list[str]]:
    """Return the tokens of each column."""
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
        "feet": page.locator(".sample > .note").all_text_contents(),
    }


def chat_sample(page: Page) -> dict[str, Any]:
    sample(page, "What is the capital of France?", mode="chat", n=1)
    return {"columns": texts(page), "problem": page.locator("#problem").inner_text()}


def shapes(page: Page) -> dict[str, Any]:
    """Show samples that end and contain code, as tokens and then as text."""
    sample(page, "Write code", mode="chat", n=2, max_tokens="200")
    opacity = "each => getComputedStyle(each, '::before').opacity"
    page.mouse.move(0, 0)
    page.focus("#prompt")
    hidden = page.locator(".token.newline").first.evaluate(opacity)
    page.locator(".sample").first.hover()
    seen = page.locator(".token.newline").first.evaluate(opacity)
    before = {
        "ends": page.locator(".token.end").all_text_contents(),
        "code": "".join(page.locator(".sample").first.locator(".token.code").all_text_contents()),
        "feet": page.locator(".sample > .note").all_text_contents(),
        "newline": [hidden, seen],
    }
    page.locator("#shape label", has_text="Text").click()
    return before | {
        "tokens": page.locator(".sample .text").first.is_visible(),
        "blocks": page.locator(".sample .plain pre").all_text_contents(),
    }


def empty_samples(page: Page) -> dict[str, Any]:
    """Show the view without samples, and rejected inputs."""
    page.click("nav a[href='#/samples']")
    folded = page.locator("#samples-top_p").is_visible()
    visible = page.locator("#samples-fields").inner_text()
    page.click("#run")
    empty = page.locator("#problem").inner_text()
    examples = page.locator("#samples-examples button").all_text_contents()
    page.locator("#samples-examples button").nth(2).click()
    prompt, mode = page.input_value("#prompt"), page.input_value("#mode")
    sampling(page, "Hello", top_p="0")
    page.click("#run")
    return {
        "folded": folded,
        "visible": visible,
        "empty": empty,
        "examples": examples,
        "filled": [prompt, mode],
        "about": page.locator("#mode-about").inner_text(),
        "top_p": page.locator("#problem").inner_text(),
        "samples": page.locator(".sample").count(),
    }


def replay(page: Page) -> dict[str, Any]:
    sample(page, "Once upon a time", seed="")  # one sample is drawn
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
    sampling(page, "Go on", max_tokens="100000")
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


def requests(page: Page) -> dict[str, Any]:
    begun(page, max_tokens=900)
    page.click("nav a[href='#/dashboard']")
    until(page, "document.querySelectorAll('#requests tbody tr').length === 1")
    row = page.locator("#requests tbody tr")
    seen = {
        "heads": page.locator("#requests th").all_inner_texts(),
        "cells": row.locator("td").all_inner_texts(),
        "title": row.get_attribute("title"),
    }
    page.click("nav a[href='#/samples']")
    page.click("#stop")
    page.click("nav a[href='#/dashboard']")
    until(page, "document.getElementById('requests').textContent === 'none'")
    return seen


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


def begun(page: Page, max_tokens: int = 160) -> None:
    """Start two long samples and wait for ten tokens of each."""
    sampling(page, "Once upon a time there was a", n="2", max_tokens=str(max_tokens), seed="7")
    page.press("#prompt", "Control+Enter")
    until(page, "document.querySelectorAll('.sample').length === 2")
    for place in (0, 1):
        until(page, f"document.querySelectorAll('.text')[{place}].childElementCount > 10")


def cut(page: Page) -> dict[str, Any]:
    """Return the view after the stream ended too early, with the server's state."""
    page.locator("#problem").wait_for()
    until(page, "document.getElementById('status').dataset.state !== 'ok'")
    return {
        "columns": texts(page),
        "problem": page.locator("#problem").inner_text(),
        "status": page.locator("#status").inner_text(),
        "feet": page.locator(".sample > .note").all_text_contents(),
    }


def replayed(page: Page) -> dict[str, Any]:
    """Return the view after the server is available again."""
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
    # A poll at the moment of death sees only a failed call. The next poll sees the state.
    until(page, "document.getElementById('status').textContent === 'restarting the engine…'")
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
    kept = page.evaluate("[Object.values({...sessionStorage}), document.cookie]")
    stored = page.evaluate("JSON.stringify({...localStorage})")
    return {"locked": locked, "columns": texts(page), "kept": kept, "stored": stored}


def phone(page: Page) -> dict[str, Any]:
    page.set_viewport_size({"width": 390, "height": 844})
    sample(page, "The sky is blue because")
    wide = []
    for view in ("samples", "dashboard", "chat"):
        page.click(f"nav a[href='#/{view}']")
        page.wait_for_timeout(300)
        wide.append(page.evaluate("document.documentElement.scrollWidth"))
    say(page, "Hello")
    open_settings(page)
    wide.append(page.evaluate("document.documentElement.scrollWidth"))
    page.goto(page.url.partition("#")[0] + "docs")
    wide.append(page.evaluate("document.documentElement.scrollWidth"))
    page.go_back()
    sample(page, "The sky is blue because")
    page.locator(".sample .token").nth(1).click()
    box = page.locator("#tip").bounding_box()
    assert box is not None
    return {"wide": wide, "tip": [box["x"], box["x"] + box["width"]]}


# -- the chat --------------------------------------------------------------------------------------


def open_settings(page: Page) -> None:
    """Unfold all settings of the chat."""
    for folded in ("#chat-settings", "#chat-settings details"):
        if page.locator(folded).get_attribute("open") is None:
            page.click(f"{folded} > summary")


def say(page: Page, message: str) -> None:
    """Send a message and wait for the end of the answer."""
    page.fill("#message", message)
    page.press("#message", "Enter")
    answered(page)


def answered(page: Page) -> None:
    until(page, "document.getElementById('chat-halt').hidden")


def conversation(page: Page) -> list[str]:
    """Return the texts of the messages."""
    return page.locator(".message .body:visible").all_inner_texts()


def chat(page: Page) -> dict[str, Any]:
    """Chat for two turns with settings and a system message, reload, and switch between chats."""
    first = page.locator("main:visible").get_attribute("id")
    open_settings(page)
    hint = page.locator("#chat-temperature").get_attribute("placeholder")
    page.fill("#chat-system", "Be brief.")
    page.fill("#chat-temperature", "0.25")
    page.fill("#message", "One")
    page.press("#message", "Shift+Enter")
    page.keyboard.type("two")
    typed = page.input_value("#message")
    page.press("#message", "Enter")
    answered(page)
    say(page, "Three")
    shown, feet = conversation(page), page.locator(".message .foot").all_inner_texts()
    page.reload()
    page.locator("#status[data-state=ok]").wait_for()
    again = [conversation(page), page.input_value("#chat-temperature")]
    system = page.input_value("#chat-system")
    page.click("#chat-new")
    fresh = [conversation(page), page.input_value("#chat-system")]
    titles = page.locator("#chats option").all_text_contents()
    page.select_option("#chats", label="One\ntwo")
    back = conversation(page)
    page.click("#chat-delete")
    page.click("#chat-delete")
    return {
        "first": first,
        "hint": hint,
        "typed": typed,
        "shown": shown,
        "feet": feet,
        "again": again,
        "system": system,
        "fresh": fresh,
        "titles": titles,
        "back": back,
        "deleted": [conversation(page), page.locator("#chats option").all_text_contents()],
    }


def markdown(page: Page) -> dict[str, Any]:
    """Check how an answer's markdown is rendered."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(page, "Show me all")
    inside = page.locator(".message.assistant .markdown")
    links = "all => all.map(each => [each.getAttribute('href'), each.rel, each.textContent])"
    page.locator(".code button").first.click()
    until(page, "document.querySelector('.code button').textContent === 'Copied'")
    code = page.evaluate("navigator.clipboard.readText()")
    page.locator(".message.assistant .tools button", has_text="Copy").click()
    until(
        page, "document.querySelector('.message.assistant .tools').textContent.includes('Copied')"
    )
    return {
        "tags": inside.evaluate(
            "each => [...new Set([...each.querySelectorAll('*')].map(x => x.tagName))]"
        ),
        "links": inside.locator("a").evaluate_all(links),
        "code": code,
        "copied": page.evaluate("navigator.clipboard.readText()"),
        "text": inside.inner_text(),
        "attributes": inside.evaluate(
            "each => [...new Set([...each.querySelectorAll('*')].flatMap(x => x.getAttributeNames()))]"
        ),
        "font": inside.locator("pre code").first.evaluate(
            "each => getComputedStyle(each).fontFamily"
        ),
    }


def turns(page: Page) -> dict[str, Any]:
    """Cut, continue and redraw an answer, and edit a message."""
    open_settings(page)
    page.fill("#chat-max_tokens", "5")
    say(page, "Count")
    cut = page.locator(".message .foot").inner_text()
    page.locator("button", has_text="Continue").click()
    answered(page)
    continued = [conversation(page), page.locator(".message .foot").inner_text()]
    page.locator("button", has_text="Regenerate").click()
    answered(page)
    again = conversation(page)
    say(page, "More")
    page.locator("button", has_text="Edit").first.click()
    page.fill(".message textarea", "Begin anew")
    page.keyboard.press("Enter")
    answered(page)
    return {"cut": cut, "continued": continued, "again": again, "edited": conversation(page)}


def halt(page: Page) -> dict[str, Any]:
    page.fill("#message", "Go on and on")
    page.press("#message", "Enter")
    until(page, "document.querySelector('.message.assistant .body')?.textContent.length > 10")
    page.fill("#message", "next")
    page.press("#message", "Enter")  # impossible during an answer
    page.click("#chat-halt")
    answered(page)
    return {
        "messages": conversation(page),
        "foot": page.locator(".message .foot").inner_text(),
        "draft": page.input_value("#message"),
        "send": page.locator("#send").is_visible(),
    }


def link(page: Page) -> dict[str, Any]:
    """Open a link: it fills in the form and sends nothing. A copied link leads to the same
    question.
    """
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(page, "Before")
    base = page.url.partition("#")[0]
    page.goto(base + "#p=Name%20a%20fruit.&seed=7&temperature=0.3&system=Be%20brief.")
    until(page, "document.getElementById('message').value !== ''")
    page.wait_for_timeout(300)
    filled = [
        page.input_value(f"#{name}")
        for name in ("message", "chat-seed", "chat-temperature", "chat-system")
    ]
    sent = conversation(page)
    let("count")
    page.press("#message", "Enter")
    answered(page)
    say(page, "And another.")
    page.locator(".message button", has_text="Link").last.click()
    until(
        page, "[...document.querySelectorAll('button')].some(each => each.textContent === 'Copied')"
    )
    copied = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(copied)
    until(page, "document.getElementById('message').value !== ''")
    opened = [conversation(page), page.input_value("#message")]
    page.goto("about:blank")
    page.goto(base + "#view=samples&p=The%20sky&mode=raw&n=2&seed=5")
    until(page, "document.getElementById('prompt').value !== ''")
    samples = [
        page.input_value(f"#{name}") for name in ("prompt", "mode", "samples-n", "samples-seed")
    ]
    return {"filled": filled, "sent": sent, "opened": opened, "samples": samples, "url": page.url}


def words(page: Page) -> dict[str, Any]:
    """Check requests that the page rejects before it sends them."""
    said = {}
    open_settings(page)
    page.press("#message", "Enter")
    said["empty"] = page.locator("#chat-problem").inner_text()
    bad = {"top_p": "0", "temperature": "hot", "max_tokens": "1.5", "seed": "-1", "tools": "{"}
    for name, value in bad.items():
        page.fill(f"#chat-{name}", value)
        page.fill("#message", "Hello")
        page.press("#message", "Enter")
        answered(page)
        said[name] = page.locator("#chat-problem").inner_text()
        assert page.input_value("#message") == "Hello"
        assert conversation(page) == []
        page.fill(f"#chat-{name}", "")
    page.select_option("#chat-grammar", "schema")
    page.press("#message", "Enter")
    answered(page)
    return said | {"grammar": page.locator("#chat-problem").inner_text()}


def calls(page: Page) -> dict[str, Any]:
    """Return a tool's result to a call; the model continues from there."""
    open_settings(page)
    page.fill("#chat-tools", '{"name": "weather", "parameters": {"type": "object"}}')
    say(page, "How is the weather?")
    name = page.locator(".call figcaption span").inner_text()
    given = page.locator(".call pre").inner_text()
    foot = page.locator(".message .foot").inner_text()
    thoughts = page.locator(".thoughts .body").text_content()
    page.fill(".call input", "sunny")
    page.locator("button", has_text="Send result").click()
    answered(page)
    page.fill("#chat-tools", "")
    page.select_option("#chat-grammar", "choice")
    page.fill("#chat-grammar_text", "yes\nno")
    say(page, "Sure?")
    return {
        "name": name,
        "given": given,
        "foot": foot,
        "thoughts": thoughts,
        "shown": conversation(page),
    }


def died(page: Page) -> dict[str, Any]:
    page.fill("#message", "Hello")
    page.press("#message", "Enter")
    page.locator("#chat-problem").wait_for()
    answered(page)
    kept = conversation(page)
    page.fill("#message", "Is there anybody?")
    page.press("#message", "Enter")
    until(page, "document.getElementById('message').value !== ''")
    return {
        "kept": kept,
        "after": conversation(page),
        "foot": page.locator(".message .foot").inner_text(),
        "draft": page.input_value("#message"),
    }


def idle(page: Page) -> dict[str, Any]:
    status = page.locator("#status").inner_text()
    page.click("nav a[href='#/dashboard']")
    until(page, "!document.getElementById('load-idle').hidden")
    page.wait_for_timeout(1200)  # the page's next poll
    return {
        "status": status,
        "charts": page.locator("#dashboard svg:visible").evaluate_all(
            "all => all.map(each => each.id)"
        ),
        "said": page.locator("#dashboard .wide .note:visible").all_inner_texts(),
    }


def keyboard(page: Page) -> dict[str, Any]:
    """Check the elements that Tab reaches, in order."""
    reached = []
    page.focus("nav a[href='#/chat']")
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent")
        )
    return {"reached": reached}


def docs(page: Page) -> dict[str, Any]:
    page.goto(page.url.partition("#")[0] + "docs")
    until(page, "!document.querySelector('.example-call pre').textContent.includes('MODEL')")
    first = page.locator(".example-call").first
    first.locator("button", has_text="Try it").click()
    first.locator("button", has_text="Send").click()
    first.locator(".answer").wait_for()
    good = [first.locator("[role=status]").inner_text(), first.locator(".answer").inner_text()]
    first.locator("textarea").fill("{")
    first.locator("button", has_text="Send").click()
    until(page, "document.querySelector('.try [role=status]').textContent.includes('JSON')")
    page.locator("#index a").last.click()
    return {
        "commands": page.locator(".example-call pre:not(.answer)").all_text_contents(),
        "good": good,
        "bad": first.locator("[role=status]").inner_text(),
        "hash": page.evaluate("location.hash"),
        "tried": page.locator(
            ".example-call", has=page.locator("button", has_text="Try it")
        ).count(),
    }


def docs_key(page: Page) -> dict[str, Any]:
    page.goto(page.url.partition("#")[0] + "docs")
    first = page.locator(".example-call").first
    first.locator("button", has_text="Try it").click()
    first.locator("button", has_text="Send").click()
    field = first.locator("input[type=password]")
    field.wait_for()
    before = page.locator(".example-call pre").first.text_content()
    field.fill("right")
    field.press("Enter")
    first.locator(".answer").wait_for()
    until(page, "!document.querySelector('.example-call pre').textContent.includes('MODEL')")
    return {"before": before, "after": page.locator(".example-call pre").first.text_content()}


LOOKS: dict[str, Callable[[Page], dict[str, Any]]] = {
    look.__name__: look
    for look in (
        *(tokens, chat_sample, replay, stop, versions, requests, restart, killed, engine_killed),
        *(hostile, keys, phone, shapes, empty_samples, idle, keyboard, docs, docs_key),
        *(chat, markdown, turns, halt, link, words, calls, died),
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
        if not name.endswith(("keys", "key")):
            page.locator("#pick option").first.wait_for(state="attached")
        seen = LOOKS[name](page)
        browser.close()
    print(json.dumps(seen | {"problems": problems}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
