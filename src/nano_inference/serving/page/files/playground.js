// A prompt, sampled several times side by side by the public routes; each token with its logprob
// and what else might have come. "Replay" asks for the same again and compares token ids.

import { ask, events } from "./api.js";
import { byId, html, shown } from "./dom.js";

const TOP = 5; // alternatives of a token
const DARKEST = 5; // nats: a token with this surprise, or more, has the deepest tint

const tokens = new WeakMap(); // span -> token
let columns = []; // of the newest run
let last = null; // {path, body} of it
let abort = null; // of the run under way

// -- what the two routes take and tell ------------------------------------------------------------

const text = new TextEncoder();

/** A token's bytes from its name in a completion's logprobs. */
function bytesOf(name) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(name)) return text.encode(name);
  return Uint8Array.from(name.slice(8).split("\\x"), (digits) => parseInt(digits, 16));
}

const readable = (bytes) => new TextDecoder().decode(bytes);

const ROUTES = {
  chat: {
    path: "v1/chat/completions",
    body: (prompt) => ({
      messages: [{ role: "user", content: prompt }],
      logprobs: true,
      top_logprobs: TOP,
    }),
    tokens: (choice) =>
      (choice.logprobs?.content ?? []).map((each) => ({
        bytes: Uint8Array.from(each.bytes),
        logprob: each.logprob,
        top: each.top_logprobs.map((one) => [
          readable(Uint8Array.from(one.bytes)),
          one.logprob,
        ]),
      })),
  },
  raw: {
    path: "v1/completions",
    body: (prompt) => ({ prompt, logprobs: TOP }),
    tokens: ({ logprobs }) =>
      (logprobs?.tokens ?? []).map((name, place) => ({
        bytes: bytesOf(name),
        logprob: logprobs.token_logprobs[place],
        top: Object.entries(logprobs.top_logprobs[place] ?? {}).map(([other, logprob]) => [
          readable(bytesOf(other)),
          logprob,
        ]),
      })),
  },
};

/** The request as the form has it; without a seed it gets one, so that it can be replayed. */
function requestOf() {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const mode = byId("mode").value;
  const route = ROUTES[mode];
  const body = {
    model: byId("pick").value || undefined,
    ...route.body(byId("prompt").value),
    n: number("n") ?? 1,
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed: number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0],
    return_token_ids: true,
    stream: true,
  };
  return { mode, path: route.path, body };
}

// -- columns --------------------------------------------------------------------------------------

class Column {
  constructor(index) {
    this.ids = [];
    this.version = null;
    this.decoder = new TextDecoder();
    this.text = html("div", { class: "text", role: "group", "aria-label": `Sample ${index + 1}` });
    this.foot = html("p", { class: "note" }, "waiting");
    const title = html("h2", {}, `Sample ${index + 1}`);
    this.root = html("article", { class: "card sample" }, title, this.text, this.foot);
    this.began = null;
  }

  add(found, ids) {
    this.began ??= performance.now();
    found.forEach((token, place) => {
      const said = this.decoder.decode(token.bytes, { stream: true });
      const span = html("span", { class: "token", tabindex: this.ids.length ? "-1" : "0" }, said);
      if (said.includes("\n")) span.classList.add("newline");
      if (!said) span.classList.add("part"); // of a character that the next token ends
      const surprise = Math.min(-token.logprob / DARKEST, 1);
      span.style.setProperty("--surprise", surprise.toFixed(3));
      tokens.set(span, { ...token, id: ids[place] });
      this.ids.push(ids[place]);
      this.text.append(span);
    });
    this.tell();
  }

  tell(choice = null) {
    const seconds = (performance.now() - this.began) / 1000;
    const rate = this.ids.length > 1 && seconds > 0 ? (this.ids.length - 1) / seconds : null;
    const parts = [`${this.ids.length} tokens`];
    if (rate !== null) parts.push(`${shown(rate)} tok/s`);
    if (choice) {
      this.version = choice.weight_version;
      parts.push(choice.finish_reason, `weights ${choice.weight_version}`);
    }
    this.foot.textContent = parts.join(" · ");
  }

  /** No more will come, though it has not ended. */
  cut(word) {
    if (this.version === null) this.foot.textContent += ` · ${word}`;
  }
}

// -- a run ----------------------------------------------------------------------------------------

function problem(message = "") {
  byId("problem").textContent = message;
  byId("problem").hidden = !message;
}

function show(these) {
  columns = these;
  byId("columns").replaceChildren(...these.map((column) => column.root));
}

async function run(request, before = null) {
  abort?.abort();
  const own = (abort = new AbortController());
  const { mode, path, body } = request;
  const said = byId("said");
  const former = { columns, last, said: said.textContent };
  last = request;
  hideTip();
  problem();
  show(Array.from({ length: body.n }, (_, index) => new Column(index)));
  said.textContent = `seed ${body.seed}`;
  byId("stop").disabled = false;
  byId("replay").disabled = true;
  const mine = columns;
  try {
    for await (const event of events(await ask(path, { body, signal: own.signal }))) {
      for (const choice of event.choices) {
        const column = mine[choice.index];
        const found = ROUTES[mode].tokens(choice);
        if (found.length) column.add(found, choice.token_ids ?? []);
        if (choice.finish_reason) column.tell(choice);
      }
    }
    if (before) said.textContent = `seed ${body.seed} · ${compared(before, mine)}`;
  } catch (failure) {
    for (const column of mine) column.cut(own.signal.aborted ? "stopped" : "cut off");
    if (abort !== own) return; // another run has taken its place
    if (own.signal.aborted) {
      said.textContent = `seed ${body.seed} · stopped`;
      return;
    }
    problem(failure.message);
    if (former.last && !mine.some((column) => column.ids.length)) {
      last = former.last; // nothing has come in the place of what was there: it stays
      said.textContent = former.said;
      show(former.columns);
    }
  } finally {
    if (abort === own) {
      byId("stop").disabled = true;
      byId("replay").disabled = false;
    }
  }
}

function compared(before, after) {
  const isEqual = (column, at) => {
    const { ids, version } = before[at];
    const again = version === null ? column.ids.slice(0, ids.length) : column.ids; // it was stopped
    return `${again}` === `${ids}`;
  };
  const same = after.filter(isEqual).length;
  const count = after.reduce((sum, column) => sum + column.ids.length, 0);
  const all = [...before, ...after].map((column) => column.version);
  const versions = [...new Set(all.filter((version) => version !== null))];
  const under = versions.length > 1 ? `, weights ${versions.join(", then ")}` : "";
  if (same === after.length) return `replayed: all ${count} tokens are equal${under}`;
  return `replayed: ${same} of ${after.length} samples are equal${under}`;
}

// -- what is told of a token ----------------------------------------------------------------------

const percent = (logprob) => `${(Math.exp(logprob) * 100).toPrecision(3)} %`;

/** A token's text in which blanks can be seen. */
const visible = (said) => JSON.stringify(said).slice(1, -1).replaceAll(" ", "␣");

function showTip(span) {
  const token = tokens.get(span);
  const tip = byId("tip");
  const rows = token.top.map(([said, logprob]) => {
    const bar = html("span", { class: "bar" });
    bar.style.setProperty("--share", Math.exp(logprob).toFixed(3));
    const word = html("td", {}, html("code", {}, visible(said)));
    const own = said === readable(token.bytes) ? "own" : undefined;
    return html("tr", { class: own }, word, html("td", {}, percent(logprob)), html("td", {}, bar));
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

function hideTip() {
  byId("tip").hidden = true;
  document.querySelector(".token.shown")?.classList.remove("shown");
}

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 };

function startTips() {
  const root = byId("columns");
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

export function startPlayground() {
  const form = byId("ask");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(requestOf());
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  byId("stop").addEventListener("click", () => abort?.abort());
  byId("replay").addEventListener("click", () => run(last, columns));
  startTips();
}
