// Sampling settings, as both views have them: a table of fields, the form that is made of it, and
// what a request holds of it. An empty field shows the default for the model in grey, which is sent:
// it may differ from the default of the route.

import { byId, html } from "./dom.js";
import { keep, kept } from "./store.js";

const lines = (text) => text.split("\n").filter((line) => line);

/** JSON, or an error that names the field. */
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

// the choice -> its name, an example, and what a request holds of the text
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

/** OpenAI's list of tools; of functions alone, or of one, it is made. */
function toolsOf(text) {
  const given = parsed(text, "Tools");
  const all = Array.isArray(given) ? given : [given];
  return all.map((each) => (each?.function ? each : { type: "function", function: each }));
}

// How a field's text becomes a value; throws an Error that names the field.
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
    about: "An answer is cut here. Empty: this number, or as many as the context has room for.",
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
    instead: " For the most probable token alone, set Temperature to 0.",
    about: "Keeps the most probable tokens that reach this probability together.",
  },
  {
    name: "top_k",
    label: "Top k",
    kind: "number",
    least: 0,
    whole: true,
    about: "Keeps so many of the most probable tokens. 0: all.",
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
    about: "Above 1: tokens that have occurred become less probable.",
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
    about: "Strings that end the answer, one a line.",
  },
  {
    name: "grammar",
    label: "Grammar",
    kind: "choice",
    options: Object.entries(GRAMMARS).map(([value, [text]]) => [value, text]),
    about: "What the answer has to be. The server allows no other tokens.",
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
      ["auto", "as the model likes"],
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
 * The settings of a view.
 *
 * `view`: its name. Fields have the ids `VIEW-FIELD`; they go into the elements `VIEW-fields` and,
 * those that are not in `shown`, `VIEW-more`; `VIEW-told` names those that are set. `hints`: values
 * of the page's own for empty fields. `without`: names of fields that the view does not have.
 */
export class Settings {
  #controls = new Map(); // name -> its element
  #view;
  #hints;
  #sampling = {}; // the server's defaults: name -> value

  constructor(view, { shown, hints, without = [] }) {
    this.#view = view;
    this.#hints = hints;
    for (const field of FIELDS.filter(({ name }) => !without.includes(name))) {
      this.#add(field, byId(`${view}-${shown.includes(field.name) ? "fields" : "more"}`));
    }
    this.fill(kept(`${view} settings`) ?? {});
    this.expect({});
  }

  #add(field, place) {
    const id = `${this.#view}-${field.name}`;
    const control = controlOf(field, id);
    const wide = field.wide ? "wide" : undefined;
    place.append(html("label", { for: id, class: wide, title: field.about }, field.label, control));
    control.addEventListener("input", () => {
      this.#fit();
      keep(`${this.#view} settings`, this.texts());
    });
    this.#controls.set(field.name, control);
  }

  /** A text is asked for where the chosen grammar needs one; folded settings are named. */
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

  /** A field's text as it stands in the form. */
  text(name) {
    return this.#controls.get(name)?.value ?? "";
  }

  /** Of each field that is not empty its text. */
  texts() {
    const all = [...this.#controls].map(([name, { value }]) => [name, value]);
    const usual = { grammar: "none", tool_choice: "auto" };
    return Object.fromEntries(all.filter(([name, text]) => text && text !== usual[name]));
  }

  /** Fill the form; what `texts` does not name becomes empty. */
  fill(texts) {
    for (const [name, control] of this.#controls) {
      const text = typeof texts[name] === "string" ? texts[name] : "";
      control.value = text;
      if (control.tagName === "SELECT" && control.value !== text) control.selectedIndex = 0;
      if (control.selectedIndex === -1) control.selectedIndex = 0;
    }
    this.#fit();
  }

  /** Empty all fields, so that the defaults hold. */
  reset() {
    this.fill({});
    keep(`${this.#view} settings`, {});
  }

  /** Show and send these values for empty fields; `sampling`: name -> value. */
  expect(sampling) {
    this.#sampling = sampling;
    for (const [name, value] of Object.entries({ ...sampling, ...this.#hints })) {
      const control = this.#controls.get(name);
      if (control) control.placeholder = String(value);
    }
  }

  /** Where `max_tokens` is empty: how many there are to be, if the context has room for them. */
  get mostTokens() {
    return this.#hints.max_tokens;
  }

  /** The fields of a request. `takesTools`: of a chat. Throws an Error that names the field. */
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
