// DOM elements. Texts become text nodes: no code of this page parses HTML from a string, and the
// browser blocks it (`require-trusted-types-for`).

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Makes an HTML element. Children are elements or texts. */
export const html = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);

/** Makes an SVG element. */
export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

/** Makes a small button. */
export function button(text, press, attributes = {}) {
  const made = html("button", { type: "button", class: "quiet small", ...attributes }, text);
  made.addEventListener("click", press);
  return made;
}

/** Makes a button with an irreversible action require a second press. */
export function onSecondPress(made, act) {
  const text = made.textContent;
  let timer;
  const calm = () => {
    clearTimeout(timer);
    made.textContent = text;
    delete made.dataset.asked;
  };
  made.addEventListener("click", () => {
    const isMeant = "asked" in made.dataset;
    calm();
    if (isMeant) return act();
    made.dataset.asked = "";
    made.textContent = `${text}? Press again`;
    timer = setTimeout(calm, 4000);
  });
}

/** Makes a button that copies the result of `textOf`, and confirms it. */
export function copyButton(textOf, text = "Copy", attributes = {}) {
  const made = button(
    text,
    async () => {
      made.textContent = (await copied(textOf())) ? "Copied" : "Cannot copy";
      setTimeout(() => (made.textContent = text), 1500);
    },
    attributes,
  );
  return made;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text); // the clipboard API exists only on https and localhost
  }
}

function copiedBySelection(text) {
  const area = html("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  const before = document.activeElement;
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus({ preventScroll: true });
  return done;
}

/** Shows a problem, or hides the element if there is no text. */
export function report(element, text = "") {
  element.textContent = text;
  element.hidden = !text;
}

/** Formats a number: 1,234 or 12.3. */
export function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : 1;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Formats seconds. */
export function shownSeconds(value) {
  if (value < 0.001) return `${Number((value * 1e6).toPrecision(3))} µs`;
  if (value < 1) return `${Number((value * 1000).toPrecision(3))} ms`;
  return `${Number(value.toPrecision(3))} s`;
}

/** Formats a count: "1 token", "12 tokens". */
export const counted = (count, word) => `${shown(count)} ${word}${count === 1 ? "" : "s"}`;
