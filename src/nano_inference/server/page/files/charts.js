// Charts as SVG, drawn anew each time. Colours are classes of style.css; every chart says in words
// what it shows (`aria-label`).

import { html, shown, svg } from "./dom.js";

const LEFT = 44; // px for numbers of the vertical axis
const BOTTOM = 18; // px for the horizontal one
const TOP = 14; // px for marks
const LETTER = 6.2; // px of a letter of 11 px, about

/** The next number above that people count in, as its half is. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 4, 6, 10].map((each) => each * power).find((each) => each >= value);
}

function begin(chart, label) {
  const width = Math.max(chart.clientWidth, 240);
  const height = Math.max(chart.clientHeight, 24);
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", label);
  chart.replaceChildren();
  return { width, height };
}

const word = (x, y, text, anchor = "start") =>
  svg("text", { x, y, "text-anchor": anchor }, text);

function axis(chart, width, height, most, bottom = BOTTOM) {
  for (const share of [0, 0.5, 1]) {
    const y = TOP + (1 - share) * (height - TOP - bottom);
    chart.append(
      svg("line", { class: "grid", x1: LEFT, x2: width, y1: y, y2: y }),
      word(LEFT - 6, y + 4, shown(most * share), "end"),
    );
  }
}

/** Entries of a legend: a colour, a name, a number. */
export function legend(list, entries) {
  list.replaceChildren(
    ...entries.map(([name, value, colour]) =>
      html("li", {}, html("i", { class: colour }), `${name} `, html("b", {}, value)),
    ),
  );
}

/**
 * Lines over time. `points`: [{time, ...values}] with a null where nothing is known; `lines`:
 * [[value's name, colour]]; `marks`: [{time, text}]; `span`: seconds that are shown.
 */
export function overTime(chart, label, points, lines, marks, span) {
  const { width, height } = begin(chart, label);
  const now = points.at(-1)?.time ?? 0;
  const seen = points.filter(({ time }) => time >= now - span);
  const most = round(Math.max(1, ...seen.flatMap((each) => lines.map(([name]) => each[name]))));
  const x = (time) => LEFT + (1 - (now - time) / span) * (width - LEFT);
  const y = (value) => TOP + (1 - value / most) * (height - TOP - BOTTOM);
  axis(chart, width, height, most);
  const step = span > 120 ? 60 : 20;
  for (let back = 0; back <= span; back += step) {
    const at = x(now - back);
    const anchor = back === 0 ? "end" : at < LEFT + 24 ? "start" : "middle";
    const ago = step === 60 ? `−${back / 60} min` : `−${back} s`;
    chart.append(word(at, height - 4, back ? ago : "now", anchor));
  }
  for (const [name, colour] of lines) {
    for (const part of parts(seen, name)) {
      const line = part.map((each) => `${x(each.time).toFixed(1)},${y(each[name]).toFixed(1)}`);
      const [first, final] = [x(part[0].time), x(part.at(-1).time)];
      const floor = y(0);
      const area = [`${first},${floor}`, ...line, `${final},${floor}`].join(" ");
      chart.append(svg("polygon", { class: `area ${colour}`, points: area }));
      chart.append(svg("polyline", { class: `line ${colour}`, points: line.join(" ") }));
    }
  }
  for (const { time, text } of marks.filter((each) => each.time >= now - span)) {
    const at = x(time);
    const anchor = at > width - 40 ? "end" : "start";
    chart.append(
      svg("line", { class: "mark", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }),
      svg("g", { class: "mark" }, word(at + (anchor === "end" ? -4 : 4), TOP - 3, text, anchor)),
    );
  }
}

/** The runs of points in which this value is known. */
function parts(points, name) {
  const found = [[]];
  for (const point of points) {
    if (point[name] === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((part) => part.length);
}

/** Bars side by side: [[name, value]]. Names that are too long to stand side by side are slanted. */
export function bars(chart, label, entries, colour) {
  const { width, height } = begin(chart, label);
  const most = round(Math.max(1, ...entries.map(([, value]) => value)));
  const step = (width - LEFT) / Math.max(entries.length, 1);
  const longest = LETTER * Math.max(0, ...entries.map(([name]) => name.length));
  const isSlanted = longest > step - 4;
  const bottom = isSlanted ? BOTTOM + 0.6 * longest : BOTTOM;
  axis(chart, width, height, most, bottom);
  entries.forEach(([name, value], place) => {
    const tall = (value / most) * (height - TOP - bottom);
    const x = LEFT + place * step;
    const y = height - bottom - tall;
    const size = { x: x + 1, y, width: Math.max(step - 2, 1), height: tall };
    chart.append(svg("rect", { class: colour, ...size }, svg("title", {}, `${name}: ${value}`)));
    const at = [x + step / 2, height - bottom + 14];
    const said = word(...at, name, isSlanted ? "end" : "middle");
    if (isSlanted) said.setAttribute("transform", `rotate(-40 ${at.join(" ")})`);
    chart.append(said);
  });
}

/** One bar of parts: [[name, value, colour]]. */
export function stack(chart, label, entries) {
  const { width, height } = begin(chart, label);
  const total = entries.reduce((sum, [, value]) => sum + value, 0) || 1;
  let x = 0;
  for (const [name, value, colour] of entries) {
    const wide = (value / total) * width;
    const size = { x, y: 0, width: Math.max(wide - 1, 0), height };
    chart.append(svg("rect", { class: colour, ...size }, svg("title", {}, name)));
    x += wide;
  }
}

/** A grid in which every kind has cells for its share: [[name, count, colour]]. */
export function grid(chart, label, entries) {
  const { width, height } = begin(chart, label);
  const total = entries.reduce((sum, [, count]) => sum + count, 0);
  const size = 14; // px of a cell, at most as many as there are
  const across = Math.floor(width / size);
  const cells = Math.min(across * Math.floor(height / size), total);
  let from = 0;
  let done = 0;
  for (const [, count, colour] of entries) {
    done += count;
    // a kind that there is at all has a cell
    const to = Math.max(Math.round((done / total) * cells), count ? from + 1 : from);
    for (let cell = from; cell < to; cell += 1) {
      const x = (cell % across) * size;
      const y = Math.floor(cell / across) * size;
      chart.append(svg("rect", { class: colour, x, y, width: size - 2, height: size - 2, rx: 2 }));
    }
    from = to;
  }
}
