// Page of one or two runs. Uses samples.js, which shows the samples of the chosen step.
const { runs, bounds } = contentOf("data");
const ROWS = 50;  // steps of a page of the table
const NAMES = [
  ["step", "step"], ["version", "weight version"], ["reward", "reward"], ["held_out", "held out"], ["kl", "KL"],
  ["length", "length"], ["loss", "loss"], ["gradient_norm", "gradient norm"], ["mismatch", "mismatch"],
  ["seconds", "seconds"], ["parameters", "hash of parameters after"],
];
// title, columns, and whether the axis begins at 0
const CHARTS = [
  ["mean reward", ["reward", "held_out"], false],
  ["completion length, tokens", ["length"], true],
  ["loss", ["loss"], false],
  ["gradient norm", ["gradient_norm"], true],
  ["largest |trainer − engine| of a logprob", ["mismatch"], true],
  ["KL to the reference, per token", ["kl"], false],
  ["seconds of a step", ["seconds"], true],
];
const ABSENT = { gradient_norm: "gradient norm (recorded if optimizer.max_grad_norm is set)", reward: "rewards",
  mismatch: "mismatch", seconds: "seconds" };
const HEIGHT = 150, LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 20;  // px of a chart
const DOTS = 40;  // lines of more points have no dots
const NOISY = 200;  // lines of more points are faint, with their mean over `WINDOW` points in front
const WINDOW = Math.ceil(Math.max(...runs.map((run) => run.columns.step.length)) / 50);
const isNumber = (value) => typeof value === "number";
const thousands = (count) => count.toLocaleString("en-US");
const written = (value) => (isNumber(value) ? shown(value, 4) : value === null ? "–" : String(value));
const has = (run, name) => run.columns[name].some((value) => value !== null);

// -- facts ------------------------------------------------------------------------------------------

function aboutOf(run) {
  const part = make("div", undefined, "run"), list = make("dl");
  if (runs.length > 1) part.append(make("h2", run.label));
  for (const [name, value] of run.facts) list.append(make("dt", name), make("dd", value));
  part.append(make("p", run.mismatch.text, run.mismatch.kind), list);
  for (const text of run.origin) part.append(make("p", text));
  for (const text of run.problems) part.append(make("p", text, "problem"));
  const config = make("details");
  config.append(make("summary", "configuration"), make("pre", run.config));
  config.lastChild.tabIndex = 0;
  part.append(config);
  return part;
}

// -- charts -----------------------------------------------------------------------------------------

function svg(name, attributes, words) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (words !== undefined) made.textContent = words;
  return made;
}

/** Returns round numbers from `low` to `high`, about `count` of them. */
function ticks(low, high, count, least = 0) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough));
  const from = Math.ceil(low / step - 1e-9), to = Math.floor(high / step + 1e-9);
  return Array.from({ length: to - from + 1 }, (_, index) => (from + index) * step);
}

/** Returns the columns of a chart: a run's number, the column's name, and points. */
function linesOf(columns) {
  return runs.flatMap((run, number) => columns.filter((name) => has(run, name)).map((name) => ({
    number, name, points: run.columns.step.map((step, row) => [step, run.columns[name][row]]),
  })));
}

function extent(values, fromZero) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (fromZero) low = Math.min(low, 0);
  if (low > high) return [0, 1];
  if (low === high) return fromZero || low === 0 ? [low, low + 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  const edge = fromZero ? 0 : (high - low) * 0.05;
  return [low - edge, high + (high - low) * 0.05];
}

/** Returns the parts of a line between unknown values. Measurements of held-out questions are rare, so they join. */
function parts({ name, points }) {
  const known = points.filter(([, value]) => isNumber(value));
  if (name === "held_out") return [known];
  const split = [[]];
  for (const point of points) {
    if (isNumber(point[1])) split.at(-1).push(point);
    else split.push([]);
  }
  return split.filter((part) => part.length);
}

const steps = [...new Set(runs.flatMap((run) => run.columns.step))].sort((a, b) => a - b);
const drawn = [];
function chartOf([title, columns, fromZero]) {
  const figure = make("figure"), picture = svg("svg", { role: "img" });
  figure.append(make("figcaption", title), picture);
  drawn.push({ picture, title, lines: linesOf(columns), fromZero });
  return figure;
}

function draw(chart) {
  const { picture, lines, fromZero } = chart, width = Math.max(picture.clientWidth, 200);
  const [low, high] = extent(lines.flatMap(({ points }) => points.map(([, value]) => value)).filter(isNumber), fromZero);
  const first = steps[0], last = Math.max(steps.at(-1), first + 1);
  const x = (step) => LEFT + (step - first) / (last - first) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
  picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  picture.setAttribute("aria-label", described(chart));
  picture.replaceChildren();
  for (const value of ticks(low, high, 4)) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, shown(value)));
  }
  for (const step of ticks(first, last, Math.max(2, width / 90), 1)) {
    picture.append(svg("text", { x: x(step), y: HEIGHT - 5, "text-anchor": "middle" }, String(step)));
  }
  chart.cursors = ["picked", "at-step"].map((kind) => svg("line", { class: kind, y1: TOP, y2: HEIGHT - BOTTOM }));
  picture.append(...chart.cursors);
  for (const line of lines) {
    const kind = `run${line.number}`, isHeld = line.name === "held_out";
    const isNoisy = !isHeld && line.name !== "mismatch" && line.points.length > NOISY;
    const add = (part, more) => {
      const points = part.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
      picture.append(svg("polyline", { class: `line ${kind}${more}`, points }));
    };
    for (const part of parts(line)) {
      add(part, isHeld ? " held" : isNoisy ? " faint" : "");
      if (isNoisy) add(means(part), "");
      if (part.length > DOTS) continue;
      for (const [step, value] of part) {
        const size = { cx: x(step), cy: y(value), r: isHeld ? 3.2 : 2.2 };
        picture.append(svg("circle", { class: `${isHeld ? "ring" : "dot"} ${kind}`, ...size }));
      }
    }
  }
  chart.x = x;
  mark(chart, 0, pickedStep);
  mark(chart, 1, null);
}

/** Returns the mean of each point and those before it, over at most `WINDOW` points. */
function means(part) {
  let sum = 0;
  return part.map(([step, value], at) => {
    sum += value - (at < WINDOW ? 0 : part[at - WINDOW][1]);
    return [step, sum / Math.min(at + 1, WINDOW)];
  });
}

function described({ title, lines }) {
  const each = lines.map(({ number, name, points }) => {
    const values = points.map(([, value]) => value).filter((value) => value !== null), known = values.filter(isNumber);
    const [low, high] = known.length ? extremes(known) : [NaN, NaN];
    const run = runs.length > 1 ? `${runs[number].label} ` : "", column = name === "held_out" ? "held out " : "";
    return `${run}${column}from ${shown(low)} to ${shown(high)}, last ${written(values.at(-1) ?? null)}`;
  });
  return `${title}: ${each.join("; ")}`;
}
const extremes = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)],
  [Infinity, -Infinity]);

function mark(chart, which, step) {
  const line = chart.cursors[which];
  line.style.display = step === null || !chart.x ? "none" : "";
  if (step === null) return;
  line.setAttribute("x1", chart.x(step));
  line.setAttribute("x2", chart.x(step));
}

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - sorted[low - 1] <= sorted[low] - wanted ? sorted[low - 1] : sorted[low];
}

function stepAt(chart, event) {
  const at = event.clientX - chart.picture.getBoundingClientRect().left;
  const first = chart.x(steps[0]), last = chart.x(steps.at(-1));
  return nearest(steps, steps[0] + (at - first) / Math.max(last - first, 1) * (steps.at(-1) - steps[0]));
}

function read(step) {
  for (const chart of drawn) mark(chart, 1, step);
  if (step === null) { $("readout").textContent = ""; return; }
  const said = runs.map((run) => {
    const row = run.columns.step.indexOf(step);
    if (row < 0) return null;
    const values = NAMES.slice(1, -1).filter(([name]) => run.columns[name][row] !== null)
      .map(([name, words]) => `${words} ${written(run.columns[name][row])}`);
    return (runs.length > 1 ? `${run.label}: ` : "") + values.join(", ");
  });
  $("readout").textContent = `step ${step}: ${said.filter((text) => text !== null).join("; ")}`;
}

function keyOf(kind, ring, words) {
  const key = make("span"), picture = svg("svg", { viewBox: "0 0 30 10", "aria-hidden": "true" });
  picture.append(svg("polyline", { class: `line ${kind}${ring ? " held" : ""}`, points: "0,5 30,5" }),
    svg("circle", { class: `${ring ? "ring" : "dot"} ${kind}`, cx: 15, cy: 5, r: 3 }));
  key.append(picture, words);
  return key;
}

function charts() {
  const kept = CHARTS.filter(([, columns]) => runs.some((run) => columns.some((name) => has(run, name))));
  const absent = Object.keys(ABSENT).filter((name) => !runs.some((run) => has(run, name)));
  const tested = runs.some((run) => has(run, "held_out"));
  $("charts").append(...kept.map(chartOf));
  $("absent").textContent = absent.length ? `Not recorded: ${absent.map((name) => ABSENT[name]).join(", ")}.` : "";
  $("keys").append(...runs.flatMap((run, number) => [
    ...(runs.length > 1 || tested ? [keyOf(`run${number}`, false, runs.length > 1 ? run.label : "training")] : []),
    ...(tested && has(run, "held_out") ? [keyOf(`run${number}`, true,
      runs.length > 1 ? `${run.label}, held-out questions` : "held-out questions")] : []),
  ]));
  const thinned = runs.filter((run) => run.steps > run.columns.step.length);
  $("keys").append(...thinned.map((run) => make("span",
    `${thousands(run.columns.step.length)} of ${thousands(run.steps)} steps of ${run.label} are shown.`)));
  if (steps.length > NOISY) $("keys").append(make("span", `Strong lines: mean of the last ${WINDOW} points.`));
  for (const chart of drawn) {
    draw(chart);
    chart.picture.addEventListener("pointermove", (event) => read(stepAt(chart, event)));
    chart.picture.addEventListener("pointerleave", () => read(null));
    chart.picture.addEventListener("click", (event) => pick(stepAt(chart, event)));
  }
  let before = innerWidth;
  addEventListener("resize", () => {
    if (before !== innerWidth) drawn.forEach(draw);
    before = innerWidth;
  });
}

// -- the table --------------------------------------------------------------------------------------

let run = runs[0], number = 0, firstRow = 0, pickedStep = null;

function table() {
  const names = NAMES.filter(([name]) => name === "step" || has(run, name));
  const count = run.columns.step.length, to = Math.min(firstRow + ROWS, count);
  const withSamples = new Set(run.samples.map(([step]) => step));
  $("names").replaceChildren(...names.map(([, words]) => {
    const head = make("th", words);
    head.scope = "col";
    return head;
  }));
  $("rows").replaceChildren(...Array.from({ length: to - firstRow }, (_, index) => {
    const row = make("tr"), at = firstRow + index, step = run.columns.step[at], head = make("th");
    head.scope = "row";
    if (withSamples.has(step)) {
      const button = make("button", step);
      button.setAttribute("aria-label", `show the samples of step ${step}`);
      button.addEventListener("click", () => pick(step));
      head.append(button);
    } else head.textContent = step;
    if (step === pickedStep) row.setAttribute("aria-current", "true");
    row.append(head, ...names.slice(1).map(([name]) =>
      make("td", written(run.columns[name][at]), name === "parameters" ? "hash" : undefined)));
    return row;
  }));
  $("range").textContent = count
    ? ` steps ${run.columns.step[firstRow]} to ${run.columns.step[to - 1]} of ${thousands(run.steps)} ` : " no steps yet ";
  const row = $("rows").querySelector("[aria-current]"), around = $("rows").closest(".wide");
  if (row) around.scrollTop = row.offsetTop - around.clientHeight / 2;
  $("earlier").disabled = firstRow === 0;
  $("later").disabled = to >= count;
}

// -- samples ----------------------------------------------------------------------------------------

function bound(step) {
  const [, some, all] = run.samples.find(([known]) => known === step);
  const most = `at most ${bounds.samples} samples and ${bounds.lines >> 20} MiB of a step, ${bounds.blocks} steps and ${
    bounds.bytes >> 20} MiB in all`;
  return `${runs.length > 1 ? `${run.label}: ` : ""}${thousands(some)} of ${thousands(all)} samples of step ${step}. This page has samples of ${
    thousands(run.samples.length)} of ${thousands(run.steps)} steps (${most}).`;
}

/** Shows the samples of the nearest step that has some here. */
function pick(wanted) {
  const known = run.samples.map(([step]) => step);
  $("samples").hidden = $("picked").hidden = !known.length;
  if (!known.length) {
    pickedStep = null;
    $("bound").textContent = "This page has no samples of the run.";
  } else {
    pickedStep = nearest(known, wanted);
    $("step").value = pickedStep;
    $("before").disabled = pickedStep === known[0];
    $("after").disabled = pickedStep === known.at(-1);
    load(contentOf(`samples-${number}-${pickedStep}`));
    $("bound").textContent = (pickedStep === wanted ? "" : `Samples of step ${wanted} are not in this page. `) +
      bound(pickedStep);
    const row = run.columns.step.indexOf(pickedStep);
    firstRow = Math.max(0, Math.floor(row / ROWS) * ROWS);
  }
  table();
  for (const chart of drawn) mark(chart, 0, pickedStep);
}

function chooseRun(which) {
  number = which;
  run = runs[number];
  options("step", run.samples.map(([step]) => [step, step]));
  pick(pickedStep ?? run.columns.step.at(-1) ?? 0);
}

function turnSteps(by) {
  firstRow += by * ROWS;
  table();
}

options("run", runs.map((each, index) => [index, each.label]));
$("chosen").hidden = runs.length < 2;
$("run").addEventListener("change", () => chooseRun(Number($("run").value)));
$("step").addEventListener("change", () => pick(Number($("step").value)));
for (const [id, by] of [["before", -1], ["after", 1]]) {
  $(id).addEventListener("click", () => {
    const known = run.samples.map(([step]) => step);
    pick(known[known.indexOf(pickedStep) + by]);
  });
}
for (const id of ["chosen", "picked"]) $(id).addEventListener("submit", (event) => event.preventDefault());
$("earlier").addEventListener("click", () => turnSteps(-1));
$("later").addEventListener("click", () => turnSteps(1));
$("runs").append(...runs.map(aboutOf));
if (steps.length) charts();
chooseRun(0);
