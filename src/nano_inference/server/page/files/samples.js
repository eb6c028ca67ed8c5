// A prompt, sampled several times side by side by the public routes. Each token has its logprob and
// the most probable alternatives. "Replay" repeats the request and compares token ids.

import { byId, button, copyButton, counted, html, report, shown } from "./dom.js";
import { linkTo } from "./links.js";
import { Markdown } from "./markdown.js";
import { about, drawn, ending, newSeed, roomFor, served } from "./server.js";
import { Settings } from "./settings.js";
import { keep, kept, keepText } from "./store.js";
import { hideTip, readable, startTips, tokens } from "./tips.js";

const TOP = 5; // alternatives per token
const DARKEST = 5; // nats: tokens with this surprise or more have the deepest tint
const EXAMPLES = [
  ["Why is the sky blue?", "chat"],
  ["Name a fruit.", "chat"],
  ["The capital of France is", "raw"],
];
const ABOUT = {
  chat: "Chat message: the prompt goes into the model's chat template, and the model answers it.",
  raw: "Raw text: the model continues the prompt as it stands, without a chat template.",
};

let settings;
let columns = []; // columns of the latest run
let last = null; // its request: {mode, path, body}
let abort = null; // controller of the current run

// -- the two routes -------------------------------------------------------------------------------

const text = new TextEncoder();

/** Returns a token's bytes from its name in a completion's logprobs. */
function bytesOf(name) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(name)) return text.encode(name);
  return Uint8Array.from(name.slice(8).split("\\x"), (digits) => parseInt(digits, 16));
}

const ROUTES = {
  chat: {
    path: "v1/chat/completions",
    prompt: (prompt, tools) => ({ messages: [{ role: "user", content: prompt }], tools }),
    sent: (prompt) => ({
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
    prompt: (prompt) => ({ prompt }),
    sent: (prompt) => ({ prompt, logprobs: TOP }),
    tokens: ({ logprobs }) =>
      (logprobs?.tokens ?? []).map((name, index) => ({
        bytes: bytesOf(name),
        logprob: logprobs.token_logprobs[index],
        top: Object.entries(logprobs.top_logprobs[index] ?? {}).map(([other, logprob]) => [
          readable(bytesOf(other)),
          logprob,
        ]),
      })),
  },
};

/** Returns the form's request, without values that only the server knows. Throws an Error. */
function requestOf() {
  const prompt = byId("prompt").value;
  if (!prompt.trim()) throw new Error("Write a prompt first.");
  const mode = byId("mode").value;
  const model = byId("pick").value || undefined;
  const body = {
    model,
    ...ROUTES[mode].sent(prompt),
    n: 3,
    ...settings.body({ takesTools: mode === "chat" }),
    return_token_ids: true,
    stream: true,
  };
  if (about && body.n > about.max_samples) {
    throw new Error(`Samples must be at most ${about.max_samples} on this server.`);
  }
  body.seed ??= newSeed(); // for replays
  return { mode, path: ROUTES[mode].path, body, prompt };
}

/** Sets the maximum length if the form has none: as many tokens as the context has room for. */
async function complete({ mode, body, prompt }, signal) {
  if (body.max_tokens !== undefined) return;
  const asked = { model: body.model, ...ROUTES[mode].prompt(prompt, body.tools) };
  body.max_tokens = await roomFor(asked, settings.mostTokens, signal);
}

// -- columns --------------------------------------------------------------------------------------

/** Tracks fenced code: lines that begin with three backticks open and close it. */
class Fence {
  #line = "";
  isOpen = false;

  /** Takes in a token's text. Returns true if it is code. */
  take(said) {
    const parts = (this.#line + said).split("\n");
    const isMark = (line) => line.trimStart().startsWith("```");
    const isCode = this.isOpen || isMark(parts[0]);
    for (const line of parts.slice(0, -1)) if (isMark(line)) this.isOpen = !this.isOpen;
    this.#line = parts.at(-1);
    return isCode;
  }
}

class Column {
  #said = []; // texts of the tokens
  #fence = new Fence();
  #calls = [];

  constructor(index, mode) {
    this.ids = [];
    this.version = null;
    this.decoder = new TextDecoder();
    this.text = html("div", { class: "text", role: "group", "aria-label": `Sample ${index + 1}` });
    this.plain = html("div", { class: mode === "chat" ? "plain markdown" : "plain" });
    this.markdown = mode === "chat" ? new Markdown(this.plain) : null;
    this.foot = html("p", { class: "note" }, "waiting…");
    const title = html("h2", {}, `Sample ${index + 1}`);
    const head = html("div", { class: "head" }, title, copyButton(() => this.#whole()));
    this.root = html("article", { class: "card sample" }, head, this.text, this.plain, this.foot);
    this.began = null;
  }

  #whole() {
    return this.#said.join("");
  }

  add(newTokens, ids) {
    this.began ??= performance.now();
    newTokens.forEach((token, index) => {
      const said = this.decoder.decode(token.bytes, { stream: true });
      const isEnd = about?.eos_token_ids.includes(ids[index]);
      const named = isEnd ? "end" : said;
      const span = html("span", { class: "token", tabindex: this.ids.length ? "-1" : "0" }, named);
      if (isEnd) span.classList.add("end");
      else this.#take(said, span);
      const surprise = Math.min(-token.logprob / DARKEST, 1);
      span.style.setProperty("--surprise", surprise.toFixed(3));
      tokens.set(span, { ...token, id: ids[index] });
      this.ids.push(ids[index]);
      this.text.append(span);
    });
    this.tell();
    if (byId("columns").dataset.shape === "text") this.draw();
  }

  #take(said, span) {
    this.#said.push(said);
    if (said.includes("\n")) span.classList.add("newline");
    if (!said) span.classList.add("part"); // part of a character that a later token completes
    if (this.#fence.take(said)) span.classList.add("code");
  }

  /** Takes in a part of a tool call. */
  call({ index, function: called }) {
    const call = (this.#calls[index] ??= { name: "", arguments: "" });
    call.name += called.name ?? "";
    call.arguments += called.arguments ?? "";
  }

  /** Draws the sample as text, for the view without tokens. */
  draw() {
    if (this.markdown) this.markdown.show(this.#whole());
    else this.plain.textContent = this.#whole();
  }

  tell(choice = null) {
    const seconds = (performance.now() - this.began) / 1000;
    const rate = this.ids.length > 1 && seconds > 0 ? (this.ids.length - 1) / seconds : null;
    const parts = [counted(this.ids.length, "token")];
    if (rate !== null) parts.push(`${shown(rate)} tok/s`);
    if (choice) {
      this.version = choice.weight_version;
      parts.push(ending(choice, this.ids.length));
      if (this.version) parts.push(`weight version ${this.version}`);
      for (const { name, arguments: text } of this.#calls) parts.push(`calls ${name}(${text})`);
    }
    this.foot.textContent = parts.join(" · ");
  }

  /** Marks the sample as incomplete if it has not ended. */
  cut(word) {
    if (this.version === null) this.foot.textContent += ` · ${word}`;
  }
}

// -- a run ----------------------------------------------------------------------------------------

const problem = (message) => report(byId("problem"), message);

function show(these) {
  columns = these;
  byId("columns").replaceChildren(...these.map((column) => column.root));
  byId("samples-shown").hidden = !these.length;
  byId("samples-empty").hidden = these.length > 0;
}

async function run(request, before = null) {
  abort?.abort();
  const controller = (abort = new AbortController());
  const { mode, path, body } = request;
  const said = byId("said");
  const former = { columns, last, said: said.textContent };
  last = request;
  hideTip();
  problem();
  show(Array.from({ length: body.n }, (_, index) => new Column(index, mode)));
  said.textContent = `seed ${body.seed}`;
  byId("stop").disabled = false;
  byId("replay").disabled = true;
  const mine = columns;
  try {
    await complete(request, controller.signal);
    for await (const event of drawn(path, body, controller.signal)) {
      for (const choice of event.choices) take(mine[choice.index], choice, mode);
    }
    if (before) said.textContent = `seed ${body.seed} · ${compared(before, mine)}`;
  } catch (failure) {
    for (const column of mine) column.cut(controller.signal.aborted ? "stopped" : "cut off");
    if (abort !== controller) return; // a newer run has replaced this one
    if (controller.signal.aborted) {
      said.textContent = `seed ${body.seed} · stopped`;
      return;
    }
    problem(failure.message);
    if (!mine.some((column) => column.ids.length)) {
      last = former.last; // no tokens arrived: restore the previous run
      said.textContent = former.said;
      show(former.columns);
    }
  } finally {
    if (abort === controller) {
      byId("stop").disabled = true;
      byId("replay").disabled = !last;
    }
  }
}

function take(column, choice, mode) {
  const newTokens = ROUTES[mode].tokens(choice);
  if (newTokens.length) column.add(newTokens, choice.token_ids ?? []);
  for (const call of choice.delta?.tool_calls ?? []) column.call(call);
  if (choice.finish_reason) column.tell(choice);
}

function compared(before, after) {
  const isEqual = (column, at) => {
    const { ids, version } = before[at];
    const again = version === null ? column.ids.slice(0, ids.length) : column.ids; // null: stopped
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

// -- the form -------------------------------------------------------------------------------------

function explainMode() {
  byId("mode-about").textContent = ABOUT[byId("mode").value];
}

/** Fills in the form from a link. */
function fill({ p, mode, view: _, ...texts }) {
  settings.fill(texts);
  byId("prompt").value = p;
  byId("mode").value = mode === "raw" ? "raw" : "chat";
  byId("samples-settings").open = Object.keys(texts).some((name) => !["n", "temperature"].includes(name));
  explainMode();
  byId("prompt").focus();
}

function linkOfForm() {
  const seed = settings.text("seed") || last?.body.seed;
  const fields = { p: byId("prompt").value, mode: byId("mode").value, ...settings.texts(), seed };
  return linkTo({ view: "samples", ...fields });
}

function startForm() {
  const form = byId("ask");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    try {
      run(requestOf());
    } catch (failure) {
      problem(failure.message);
    }
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  byId("stop").addEventListener("click", () => abort?.abort());
  byId("replay").addEventListener("click", () => run(last, columns));
  byId("samples-reset").addEventListener("click", () => settings.reset());
  byId("samples-link").append(
    copyButton(linkOfForm, "Copy link", {
      class: "quiet",
      title: "A link that fills in this prompt with its settings and seed, without sampling",
    }),
  );
}

function startShape() {
  byId("shape").addEventListener("change", (event) => {
    byId("columns").dataset.shape = event.target.value;
    hideTip();
    for (const column of columns) column.draw();
  });
}

function startExamples() {
  const use = (prompt, mode) => () => {
    byId("prompt").value = prompt;
    byId("mode").value = mode;
    keep("samples draft", prompt);
    keep("samples mode", mode);
    explainMode();
    byId("prompt").focus();
  };
  byId("samples-examples").append(
    ...EXAMPLES.map(([prompt, mode]) => {
      const text = mode === "raw" ? `${prompt} …` : prompt;
      return html("li", {}, button(text, use(prompt, mode), { class: "example" }));
    }),
  );
}

/** Starts the view. Returns the function that fills in a link. */
export function startSamples() {
  settings = new Settings("samples", {
    shown: ["n", "temperature"],
    hints: { n: 3, max_tokens: 256 },
  });
  served.addEventListener("known", () => settings.expect(about.sampling));
  keepText(byId("prompt"), "samples draft");
  if (kept("samples mode") === "raw") byId("mode").value = "raw";
  byId("mode").addEventListener("change", () => {
    keep("samples mode", byId("mode").value);
    explainMode();
  });
  explainMode();
  startForm();
  startShape();
  startExamples();
  startTips(byId("columns"));
  return fill;
}
