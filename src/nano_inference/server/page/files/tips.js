// Tooltip of a token that is hovered, tapped or focused: its probability, and the most probable
// alternatives.

import { byId, html } from "./dom.js";

/** span -> token: {bytes, logprob, top: [[text, logprob]], id} */
export const tokens = new WeakMap();

export const readable = (bytes) => new TextDecoder().decode(bytes);

const percent = (logprob) => `${(Math.exp(logprob) * 100).toPrecision(3)} %`;

/** Returns a token's text with visible spaces. */
const visible = (said) => JSON.stringify(said).slice(1, -1).replaceAll(" ", "␣");

function showTip(span) {
  const token = tokens.get(span);
  const tip = byId("tip");
  const rows = token.top.map(([said, logprob]) => {
    const bar = html("span", { class: "bar" });
    bar.style.setProperty("--share", Math.exp(logprob).toFixed(3));
    const word = html("td", {}, html("code", {}, visible(said)));
    const name = said === readable(token.bytes) ? "own" : undefined;
    return html("tr", { class: name }, word, html("td", {}, percent(logprob)), html("td", {}, bar));
  });
  tip.replaceChildren(
    html("p", {}, html("code", {}, visible(readable(token.bytes))), ` ${percent(token.logprob)}`),
    html("p", { class: "note" }, `logprob ${token.logprob.toFixed(4)} · id ${token.id}`),
    html("table", { "aria-label": "Most probable tokens" }, html("tbody", {}, ...rows)),
  );
  tip.hidden = false;
  document.querySelector(".token.shown")?.classList.remove("shown");
  span.classList.add("shown");
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const left = Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = at.bottom + 6;
  const top = below + tip.offsetHeight > innerHeight ? at.top - tip.offsetHeight - 6 : below;
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${Math.max(8, top) + scrollY}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
  document.querySelector(".token.shown")?.classList.remove("shown");
}

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 };

/** Shows tooltips for the tokens in `root`. */
export function startTips(root) {
  const tokenAt = (event) => event.target.closest?.(".token");
  root.addEventListener("pointerover", (event) => {
    if (tokenAt(event)) showTip(tokenAt(event));
  });
  root.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") hideTip();
  });
  root.addEventListener("click", (event) => tokenAt(event)?.focus());
  root.addEventListener("focusin", (event) => {
    const span = tokenAt(event);
    if (!span) return;
    for (const other of span.parentElement.querySelectorAll('[tabindex="0"]')) {
      other.tabIndex = -1;
    }
    span.tabIndex = 0;
    span.setAttribute("aria-describedby", "tip");
    showTip(span);
  });
  root.addEventListener("focusout", (event) => {
    tokenAt(event)?.removeAttribute("aria-describedby");
    hideTip();
  });
  root.addEventListener("keydown", (event) => {
    const span = tokenAt(event);
    if (!span || !(event.key in STEPS)) return;
    event.preventDefault();
    const next = STEPS[event.key] > 0 ? span.nextElementSibling : span.previousElementSibling;
    next?.focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
  });
}
