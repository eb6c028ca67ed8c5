// `/docs`: fills in the model's name, copies examples, and sends them to the server.

import { ask, useKey } from "./api.js";
import { button, copyButton, html, shownSeconds } from "./dom.js";

const LONGEST = 20_000; // maximum characters of an answer that are shown
const NAME = "MODEL"; // placeholder in the examples
const PLAIN = /^[\w./:@+-]+$/; // names that need no quoting in a shell, in JSON or in Python

const examples = [...document.querySelectorAll(".example-call")];

/** Replaces MODEL by the model's name, if the server reveals it. */
async function fillIn() {
  let name;
  try {
    const { data } = await (await ask("v1/models")).json();
    name = data[0]?.id ?? "";
  } catch {
    return; // the server is starting, or requires a key: the examples stay unchanged
  }
  if (!PLAIN.test(name)) return;
  const texts = document.querySelectorAll(".example-call pre:not(.answer)");
  for (const each of texts) replace(each, "textContent", name);
  for (const each of document.querySelectorAll(".try textarea")) replace(each, "value", name);
}

function replace(element, property, name) {
  const text = element[property];
  const filled = text.replaceAll(`"${NAME}"`, `"${name}"`).replaceAll(`'${NAME}'`, `'${name}'`);
  if (filled !== text) element[property] = filled;
}

/** Makes a field for the API key, shown after a 401. */
function keyField(send) {
  const field = html("input", { type: "password", autocomplete: "off", placeholder: "API key" });
  field.setAttribute("aria-label", "API key");
  const use = async () => {
    useKey(field.value.trim());
    await fillIn();
    send();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") use();
  });
  return html("div", { class: "composer" }, field, button("Use key", use));
}

/** Adds the controls that send an example and show the reply. */
function startTrying(example) {
  const { path, body } = example.dataset;
  const area = body && html("textarea", { class: "mono", spellcheck: "false" });
  if (area) {
    Object.assign(area, { value: body, rows: Math.min(body.split("\n").length, 16) });
    area.setAttribute("aria-label", `Body of ${path}`);
  }
  const said = html("p", { class: "note", role: "status" });
  const answer = html("pre", { class: "answer", tabindex: "0", hidden: true });
  const locked = html("div");
  const root = html("div", { class: "try", hidden: true });
  const send = async () => {
    said.textContent = "sending…";
    answer.hidden = true;
    locked.replaceChildren();
    const began = performance.now();
    try {
      const reply = await ask(path.slice(1), { body: area ? parsed(area.value) : undefined });
      answer.textContent = shortened(readable(await reply.text()));
      answer.hidden = false;
      said.textContent = `${reply.status} · ${shownSeconds((performance.now() - began) / 1000)}`;
    } catch (problem) {
      said.textContent = [problem.status, problem.message].filter(Boolean).join(": ");
      if (problem.status === 401) locked.append(keyField(send));
    }
  };
  const run = button("Send", send, { class: "small" });
  root.append(...[area, html("div", { class: "tools" }, run), locked, said, answer].filter(Boolean));
  const open = button("Try it", () => {
    root.hidden = !root.hidden;
    open.setAttribute("aria-expanded", String(!root.hidden));
    if (!root.hidden) (area ?? run).focus();
  });
  open.setAttribute("aria-expanded", "false");
  example.append(html("div", { class: "tools" }, open), root);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (problem) {
    throw new Error(`The body is not valid JSON: ${problem.message}`);
  }
}

function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // for example the metrics
  }
}

const shortened = (text) =>
  text.length > LONGEST ? `${text.slice(0, LONGEST)}\n… ${text.length - LONGEST} more` : text;

for (const figure of document.querySelectorAll("figure.code")) {
  const code = figure.querySelector("pre");
  figure.querySelector("figcaption").append(copyButton(() => code.textContent));
}
for (const example of examples) if (example.dataset.path) startTrying(example);
fillIn();
