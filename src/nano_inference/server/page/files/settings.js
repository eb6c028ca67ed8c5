// Sampling settings of both views: a table of fields, the form made from it, and the fields of a
// request. An empty field shows the model's default in gray, which is sent: it may differ from the
// route's default.

import { byId, html } from "./dom.js";
import { keep, kept } from "./store.js";

const lines = (text) => text.split("\n").filter((line) => line);

/** Parses JSON. The error names the field. */
function parsed(text, label) {
  try {
    return JSON.parse(text);
  } catch (problem) {
    throw new Error(`${label} is not valid JSON: ${problem.message}`);
  }
}

function needed(text, label) {
  if (!text.trim()) throw new Error(`${label} is empty. Fill it in, or choose no grammar.`);
  return text;
}

const schema = (text) => parsed(needed(text, "The JSON schema"), "The JSON schema");
const outputs = (name, value) => ({ structured_outputs: { [name]: value } });

// choice -> label, example, and a function from the text to the request's fields
const GRAMMARS = {
  none: ["none", "", () => ({})],
  object: ["a JSON object", "", () => ({ response_format: { type: "json_object" } })],
  schema: [
    "JSON schema",
    '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
    (text) => ({
      response_format: { type: "json_schema", json_schema: { name: "answer", schema: schema(text) } },
    }),
  ],
  regex: ["regular expression", "[0-9]{4}-[0-9]{2}-[0-9]{2}", (text) =>
    outputs("regex", needed(text, "The regular expression"))],
  choice: ["one of these lines", "yes\nno", (text) =>
    outputs("choice", lines(needed(text, "The list of choices")))],
  grammar: ["grammar (GBNF or Lark)", 'root ::= "yes" | "no"', (text) =>
    outputs("grammar", needed(text, "The grammar"))],
};

const TOOLS = `[{"name": "get_weather", "parameters": {"type": "object", "properties":
  {"city": {"type": "string"}}, "required": ["city"]}}]`;

/** Returns OpenAI's list of tools, also from a list of functions or a single one. */
function toolsOf(text) {
  const value = parsed(text, "Tools");
  const all = Array.isArray(value) ? value : [value];
  return all.map((each) => (each?.function ? each : { type: "function", function: each }));
}

// Conversions from a field's text to its value. They throw an Error that names the field.
const READ = {
  number(text, field) {
    const value = Number(text);
    const { label, least, above, most, whole } = field;
    const from = above === undefined ? `${least} or more` : `more than ${above}`;
    const isLow = above === undefined ? value < least : value <= above;
    if (Number.isNaN(value) || isLow || value > most || (whole && !Number.isInteger(value))) {
      const kind = whole ? "a whole number" : "a number";
      const limits = most === undefined ? from : `${from}, and at most ${most}`;
      throw new Error(`${label} must be ${kind}, ${limits}.${field.instead ?? ""}`);
    }
    return value;
  },
  lines,
  tools: toolsOf,
  choice: (text) => text,
};

const FIELDS = [
  { name: "n", label: "Samples", kind: "number", least: 1, most: 16, whole: true },
  {
    name: "temperature",
    label: "Temperature",
    kind: "number",
    least: 0,
    most: 2,
    about: "0: always the most probable token. Higher: more surprising answers.",
  },
  {
    name: "max_tokens",
    label: "Max tokens",
    kind: "number",
    least: 1,
    whole: true,
    about: "Maximum length of the answer. Empty: this number, or the rest of the context if less.",
  },
  {
    name: "seed",
    label: "Seed",
    kind: "number",
    least: 0,
    most: Number.MAX_SAFE_INTEGER,
    whole: true,
    hint: "random",
    about: "The same seed, prompt and weights give the same tokens.",
  },
  {
    name: "top_p",
    label: "Top p",
    kind: "number",
    above: 0,
    most: 1,
    instead: " For only the most probable token, set Temperature to 0.",
    about: "Keeps the most probable tokens that reach this probability together.",
  },
  {
    name: "top_k",
    label: "Top k",
    kind: "number",
    least: 0,
    whole: true,
    about: "Keeps this many of the most probable tokens. 0: all.",
  },
  {
    name: "min_p",
    label: "Min p",
    kind: "number",
    least: 0,
    most: 1,
    about: "Keeps tokens with at least this share of the best one's probability.",
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    kind: "number",
    least: 0.01,
    most: 100,
    about: "Above 1: tokens that have already occurred become less probable.",
  },
  {
    name: "presence_penalty",
    label: "Presence penalty",
    kind: "number",
    least: -2,
    most: 2,
    about: "Subtracted once from the logits of tokens in the answer so far.",
  },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    kind: "number",
    least: -2,
    most: 2,
    about: "Subtracted for each time that a token occurs in the answer so far.",
  },
  {
    name: "stop",
    label: "Stop at",
    kind: "lines",
    rows: 2,
    about: "Strings that end the answer, one per line.",
  },
  {
    name: "grammar",
    label: "Grammar",
    kind: "choice",
    options: Object.entries(GRAMMARS).map(([value, [text]]) => [value, text]),
    about: "Format that the answer must follow. The server allows no other tokens.",
  },
  { name: "grammar_text", label: "Grammar text", kind: "lines", rows: 4, mono: true, wide: true },
  {
    name: "tools",
    label: "Tools (JSON)",
    kind: "tools",
    rows: 4,
    mono: true,
    wide: true,
    hint: TOOLS,
    about: "Functions that the model may call, as OpenAI's clients send them.",
  },
  {
    name: "tool_choice",
    label: "Tool use",
    kind: "choice",
    options: [
      ["auto", "the model decides"],
      ["required", "at least one call"],
      ["none", "none"],
    ],
  },
];

function controlOf(field, id) {
  if (field.kind === "choice") {
    const options = field.options.map(([value, text]) => html("option", { value }, text));
    return html("select", { id }, ...options);
  }
  const about = { id, placeholder: field.hint, spellcheck: "false", autocomplete: "off" };
  if (field.rows) {
    return html("textarea", { ...about, rows: field.rows, class: field.mono && "mono" });
  }
  return html("input", { ...about, inputmode: "decimal" });
}

/**
 * Settings of a view.
 *
 * `view`: its name. Fields have the ids `VIEW-FIELD`. Those in `shown` go into the element
 * `VIEW-fields`, the others into `VIEW-more`. `VIEW-told` lists the fields that are set. `hints`:
 * the page's own values for empty fields. `without`: names of fields that the view lacks.
 */
export class Settings {
  #controls = new Map(); // name -> element
  #view;
  #hints;
  #sampling = {}; // server's defaults: name -> value

  constructor(view, { shown, hints, without = [] }) {
    this.#view = view;
    this.#hints = hints;
    for (const field of FIELDS.filter(({ name }) => !without.includes(name))) {
      this.#add(field, byId(`${view}-${shown.includes(field.name) ? "fields" : "more"}`));
    }
    this.fill(kept(`${view} settings`) ?? {});
    this.expect({});
  }

  #add(field, parent) {
    const id = `${this.#view}-${field.name}`;
    const control = controlOf(field, id);
    const wide = field.wide ? "wide" : undefined;
    parent.append(html("label", { for: id, class: wide, title: field.about }, field.label, control));
    control.addEventListener("input", () => {
      this.#fit();
      keep(`${this.#view} settings`, this.texts());
    });
    this.#controls.set(field.name, control);
  }

  /** Shows the text field of a grammar if it needs one, and lists the settings in the summary. */
  #fit() {
    const texts = this.texts();
    const named = FIELDS.filter(({ name }) => texts[name]).map(({ label, name, kind }) =>
      kind === "number" ? `${label} ${texts[name]}` : label,
    );
    byId(`${this.#view}-told`).textContent = named.map((each) => ` · ${each}`).join("");
    const [, example] = GRAMMARS[this.text("grammar")] ?? GRAMMARS.none;
    const area = this.#controls.get("grammar_text");
    area.placeholder = example;
    area.labels[0].hidden = !example;
  }

  /** Returns a field's text. */
  text(name) {
    return this.#controls.get(name)?.value ?? "";
  }

  /** Returns the texts of the fields that are set. */
  texts() {
    const all = [...this.#controls].map(([name, { value }]) => [name, value]);
    const usual = { grammar: "none", tool_choice: "auto" };
    return Object.fromEntries(all.filter(([name, text]) => text && text !== usual[name]));
  }

  /** Fills in the form. Fields without a text in `texts` become empty. */
  fill(texts) {
    for (const [name, control] of this.#controls) {
      const text = typeof texts[name] === "string" ? texts[name] : "";
      control.value = text;
      if (control.tagName === "SELECT" && control.value !== text) control.selectedIndex = 0;
      if (control.selectedIndex === -1) control.selectedIndex = 0;
    }
    this.#fit();
  }

  /** Empties all fields, so that the defaults apply. */
  reset() {
    this.fill({});
    keep(`${this.#view} settings`, {});
  }

  /** Shows and sends these values for empty fields. `sampling`: name -> value. */
  expect(sampling) {
    this.#sampling = sampling;
    for (const [name, value] of Object.entries({ ...sampling, ...this.#hints })) {
      const control = this.#controls.get(name);
      if (control) control.placeholder = String(value);
    }
  }

  /** Maximum tokens if `max_tokens` is empty and the context has room for them. */
  get mostTokens() {
    return this.#hints.max_tokens;
  }

  /** Returns a request's fields. `takesTools`: for a chat. Throws an Error that names the field. */
  body({ takesTools }) {
    const body = { ...this.#sampling };
    for (const field of FIELDS) {
      const text = this.text(field.name);
      if (!this.#controls.has(field.name) || !text.trim()) continue;
      body[field.name] = READ[field.kind](text, field);
    }
    const { grammar = "none", grammar_text, tools, tool_choice, ...rest } = body;
    const [, , ask] = GRAMMARS[grammar];
    const called = takesTools && tools ? { tools, tool_choice } : {};
    return { ...rest, ...called, ...ask(this.text("grammar_text")) };
  }
}
