"use strict";
// Shows the samples of one block (`samples.py`) at a time: `load(content)`.
const GROUPS = 10, SAMPLES = 8, TOKENS = 600;  // shown per page, per group and per sample before "all" is clicked
const NO_LOGPROB = -32768, APPENDED = 32767;
const $ = (id) => document.getElementById(id);

function numbers(kind, text) {
  const bytes = Uint8Array.from(atob(text || ""), (each) => each.charCodeAt(0));
  const size = kind.BYTES_PER_ELEMENT, view = new DataView(bytes.buffer), found = new kind(bytes.length / size);
  const read = { Uint32Array: "getUint32", Int16Array: "getInt16", Float32Array: "getFloat32" }[kind.name];
  for (let place = 0; place < found.length; place++) found[place] = view[read](place * size, true);
  return found;
}
const contentOf = (id) => JSON.parse($(id).textContent);
let data, texts, ids, logprobs, trainer, advantages, samples, low, high, bars = [];

function make(name, words, kind) {
  const made = document.createElement(name);
  if (words !== undefined) made.textContent = words;
  if (kind) made.className = kind;
  return made;
}
function shown(number, digits = 3) {
  return number === null || Number.isNaN(number) ? "–" : String(Number(number.toPrecision(digits)));
}
function textOf(sample) {
  if (sample.text !== null) return sample.text;
  let said = "";
  for (let place = sample.begin; place < sample.end; place++) said += texts[ids[place]];
  return said;
}

// Class of a token's color, by the selected coloring.
const logprobAt = (place) => {
  const value = logprobs[place];
  return value === undefined || value === NO_LOGPROB || value === APPENDED ? null : value / 1000;
};
const level = (value, steps) => ["", "a", "b", "c", "d"][steps.filter((step) => value >= step).length];
const versionAt = (sample, place) => {
  const span = (sample.spans || []).find((each) => place - sample.begin >= each[1] && place - sample.begin < each[2]);
  return span ? span[0] : sample.version;
};
const COLOURS = {
  probability: {
    has: () => logprobs.some((each) => each !== NO_LOGPROB && each !== APPENDED),
    of: (place) => (logprobAt(place) === null ? "" :
      level(-logprobAt(place), [0.105360, 0.693147, 2.302585, 4.605170].map((each) => each + 0.0005))),
    legend: [["", "≥ 90 %"], ["a", "≥ 50 %"], ["b", "≥ 10 %"], ["c", "≥ 1 %"], ["d", "< 1 %"]],
  },
  mismatch: {
    has: () => trainer.some((each) => !Number.isNaN(each)),
    of: (place) => (Number.isNaN(trainer[place]) ? "" : level(Math.abs(trainer[place]), [1e-6, 1e-3, 1e-2, 1e-1])),
    legend: [["", "equal"], ["a", "≥ 1e-6"], ["b", "≥ 0.001"], ["c", "≥ 0.01"], ["d", "≥ 0.1"]],
  },
  advantage: {
    has: () => advantages.some((each) => !Number.isNaN(each)),
    of: (place) => (advantages[place] > 0 ? "good" : advantages[place] < 0 ? "bad" : ""),
    legend: [["good", "> 0"], ["bad", "< 0"]],
  },
  version: {
    has: () => new Set(samples.flatMap((each) => [each.version, ...(each.spans || []).map((span) => span[0])])).size > 1,
    of: (place, sample) => "v" + ((versionAt(sample, place) || 0) % 6),
    legend: [],
  },
  none: { has: () => true, of: () => "", legend: [] },
};
const ORDERS = {
  "as in the file": null,
  "spread of rewards": (group) => -spread(group.samples),
  "lowest reward first": (group) => mean(group.samples.map((each) => each.reward)),
  "longest first": (group) => -Math.max(...group.samples.map((each) => each.end - each.begin)),
};
function mean(values) {
  const known = values.filter((each) => each !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : 0;
}
function spread(some) {
  const known = some.map((each) => each.reward).filter((each) => each !== null);
  return known.length ? Math.max(...known) - Math.min(...known) : 0;
}

/** Fills a select. The selected value remains if it is among the new ones. */
function options(id, entries) {
  const before = $(id).value;
  $(id).replaceChildren(...entries.map(([value, words]) => {
    const option = make("option", words);
    option.value = value;
    return option;
  }));
  if (entries.some(([value]) => String(value) === before)) $(id).value = before;
}
const different = (key) => [...new Set(samples.map((each) => each[key]))].filter((each) => each !== null);

const BINS = 20;
const edge = (place) => low + (high - low) * place / BINS;
function histogram(rewards) {
  [low, high] = [Infinity, -Infinity];
  for (const each of rewards) { low = Math.min(low, each); high = Math.max(high, each); }
  for (const each of document.querySelectorAll(".rewards")) each.hidden = !rewards.length;
  const bins = Array(BINS).fill(0);
  const binOf = (reward) => (high > low ? Math.min(BINS - 1, Math.floor((reward - low) / (high - low) * BINS)) : 0);
  for (const each of rewards) bins[binOf(each)]++;
  const mostInABin = Math.max(...bins);
  bars = rewards.length ? bins.map((count, place) => {
    const bar = make("button", undefined, count ? "" : "none");
    bar.style.height = `${100 * count / mostInABin}%`;
    bar.title = `${count} samples, reward ${shown(edge(place))} to ${shown(edge(place + 1))}`;
    bar.setAttribute("aria-label", bar.title);
    bar.addEventListener("click", () => {
      $("least").value = edge(place);
      $("most").value = edge(place + 1);
      choose();
    });
    return bar;
  }) : [];
  $("rewards").replaceChildren(...bars);
}

let chosen = [], page = 0;
function choose() {
  const words = $("search").value.toLowerCase(), finish = $("finish").value, version = $("version").value;
  const least = $("least").value === "" ? null : Number($("least").value);
  const most = $("most").value === "" ? null : Number($("most").value);
  const isIn = (each) =>
    (finish === "" || each.finish === finish) &&
    (version === "" || String(each.version) === version) &&
    (least === null || (each.reward !== null && each.reward >= least)) &&
    (most === null || (each.reward !== null && each.reward <= most)) &&
    (words === "" || textOf(each).toLowerCase().includes(words) ||
      data.groups[each.group].toLowerCase().includes(words));
  const found = new Map();
  for (const each of samples) {
    if (!isIn(each)) continue;
    if (!found.has(each.group)) found.set(each.group, { number: each.group, samples: [] });
    found.get(each.group).samples.push(each);
  }
  chosen = [...found.values()];
  const order = ORDERS[$("order").value];
  if (order) {
    const keys = new Map(chosen.map((each) => [each, order(each)]));
    chosen.sort((one, other) => keys.get(one) - keys.get(other));
  }
  bars.forEach((bar, place) => bar.classList.toggle("out",
    (least !== null && edge(place + 1) <= least) || (most !== null && edge(place) >= most)));
  page = 0;
  show();
}

function show() {
  const colour = COLOURS[$("colour").value];
  $("legend").replaceChildren(...colour.legend.map(([kind, words]) => make("span", words, kind)));
  const count = chosen.reduce((sum, each) => sum + each.samples.length, 0);
  const first = page * GROUPS, last = Math.min(first + GROUPS, chosen.length);
  $("place").textContent = chosen.length
    ? ` groups ${first + 1} to ${last} of ${chosen.length}; ${count} samples, mean reward ${
        bars.length ? shown(mean(chosen.flatMap((each) => each.samples.map((one) => one.reward)))) : "–"} `
    : " no sample matches ";
  $("back").disabled = page === 0;
  $("on").disabled = last >= chosen.length;
  $("groups").replaceChildren(...chosen.slice(first, last).map((group) => groupOf(group, colour)));
  $("token").textContent = "";
}
function groupOf(group, colour) {
  const part = make("section"), grid = make("div", undefined, "samples"), some = group.samples;
  part.append(make("h3", `group ${group.number + 1}: ${some.length} sample${some.length > 1 ? "s" : ""}`));
  part.append(make("div", data.groups[group.number], "prompt"), grid);
  grid.append(...some.slice(0, SAMPLES).map((each) => cardOf(each, colour)));
  if (some.length > SAMPLES) {
    const more = make("button", `all ${some.length} samples`);
    more.addEventListener("click", () => {
      grid.append(...some.slice(SAMPLES).map((each) => cardOf(each, colour)));
      more.remove();
    });
    part.append(more);
  }
  return part;
}
function cardOf(sample, colour) {
  const card = make("article"), head = make("h4", `#${sample.index === null ? sample.number : sample.index}`);
  card.tabIndex = 0;
  card.dataset.sample = sample.number;
  const count = sample.end - sample.begin;
  if (sample.reward !== null) head.append(make("b", `reward ${shown(sample.reward)}`));
  if (sample.advantage !== null) {
    const sign = sample.advantage > 0 ? "good" : sample.advantage < 0 ? "bad" : "";
    head.append(make("b", `advantage ${shown(sample.advantage)}`, sign));
  }
  const facts = [`${count} tokens`, sample.finish, sample.version === null ? null : `version ${sample.version}`];
  const known = [];
  for (let place = sample.begin; place < sample.end; place++) known.push(logprobAt(place));
  if (known.some((each) => each !== null)) facts.push(`mean logprob ${shown(mean(known))}`);
  head.append(make("span", [...facts, `line ${sample.line}`].filter((each) => each !== null).join(", ")));
  card.append(head);
  if (sample.text !== null) card.append(make("p", sample.text, "text"));
  const body = make("div", undefined, "text");
  tokensInto(body, sample, sample.begin, Math.min(sample.end, sample.begin + TOKENS), colour);
  card.append(body);
  if (count > TOKENS) {
    const more = make("button", `all ${count} tokens`);
    more.addEventListener("click", () => {
      tokensInto(body, sample, sample.begin + TOKENS, sample.end, colour);
      more.remove();
    });
    card.append(more);
  }
  return card;
}
function tokensInto(body, sample, begin, end, colour) {
  for (let place = begin; place < end; place++) {
    const said = texts[ids[place]];
    if (said === "") continue;  // a later token completes this text
    const kind = logprobs[place] === APPENDED ? "appended" : colour.of(place, sample);
    const token = make("span", kind && kind !== "appended" ? said.replaceAll("\n", "↵\n") : said, kind);
    token.dataset.place = place;
    body.append(token);
  }
}

function tell(token) {
  document.querySelector(".at")?.classList.remove("at");
  token.classList.add("at");
  const place = Number(token.dataset.place), sample = samples[token.closest("article").dataset.sample];
  const facts = [`token ${place - sample.begin + 1} ${JSON.stringify(texts[ids[place]])}`];
  const logprob = logprobAt(place);
  if (logprobs[place] === APPENDED) facts.push("appended, not sampled");
  if (logprob !== null) facts.push(`logprob ${logprob.toFixed(3)} (${shown(100 * Math.exp(logprob))} %)`);
  if (trainer.length && !Number.isNaN(trainer[place])) facts.push(`engine − trainer ${shown(trainer[place])}`);
  if (advantages.length && !Number.isNaN(advantages[place])) facts.push(`advantage ${shown(advantages[place])}`);
  const version = versionAt(sample, place);
  if (version !== null) facts.push(`version ${version}`);
  $("token").textContent = facts.join("; ");
}
for (const kind of ["pointerover", "click"]) {
  $("groups").addEventListener(kind, (event) => {
    if (event.target.dataset?.place !== undefined) tell(event.target);
  });
}
function turn(by) {
  if (page + by < 0 || (page + by) * GROUPS >= chosen.length) return;
  page += by;
  show();
  $("back").parentElement.scrollIntoView();
}
$("back").addEventListener("click", () => turn(-1));
$("on").addEventListener("click", () => turn(1));
let timer = 0;
$("filters").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(choose, 150); });
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("filters").addEventListener("reset", () => setTimeout(choose));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, .wide")) return;
  const step = { ",": -1, ".": 1 }[event.key], card = event.target.closest("article");
  if (event.key === "ArrowRight") turn(1);
  else if (event.key === "ArrowLeft") turn(-1);
  else if (event.key === "/") { event.preventDefault(); $("search").focus(); }
  else if (step && card) {
    const all = [...card.querySelectorAll("[data-place]")], at = all.indexOf(card.querySelector(".at"));
    const next = all[at < 0 ? 0 : at + step];
    if (next) { tell(next); next.scrollIntoView({ block: "nearest" }); }
  }
});

/** Shows a block's samples in place of those before. Filters that still apply remain. */
function load(content) {
  data = content;
  texts = data.texts;
  ids = numbers(Uint32Array, data.ids);
  logprobs = numbers(Int16Array, data.logprobs);
  trainer = numbers(Float32Array, data.trainer);
  advantages = numbers(Float32Array, data.advantages);
  samples = data.samples.map((row, number) => ({
    number, group: row[0], begin: row[1], end: row[2], line: row[3], index: row[4], finish: row[5], version: row[6],
    reward: row[7], advantage: row[8], text: row[9], spans: row[10],
  }));
  options("finish", [["", "any"], ...different("finish").sort().map((each) => [each, each])]);
  options("version", [["", "any"], ...different("version").sort((a, b) => a - b).map((each) => [each, each])]);
  options("colour", Object.keys(COLOURS).filter((each) => COLOURS[each].has()).map((each) => [each, each]));
  options("order", Object.keys(ORDERS).map((each) => [each, each]));
  const rewards = samples.map((each) => each.reward).filter((each) => each !== null);
  histogram(rewards);
  $("facts").textContent = `${samples.length} samples of ${data.groups.length} prompts, ${ids.length} tokens` +
    (rewards.length ? `; rewards ${shown(low)} to ${shown(high)}, mean ${shown(mean(rewards))}` : "; no rewards");
  const { count, reasons } = data.refused;
  $("refused").hidden = !count;
  $("refused").querySelector("summary").textContent = `lines left out: ${count}`;
  $("refused").querySelector("ul").replaceChildren(...reasons.map((each) => make("li", each)));
  if (count > reasons.length) $("refused").querySelector("ul").append(make("li", "…"));
  choose();
}
