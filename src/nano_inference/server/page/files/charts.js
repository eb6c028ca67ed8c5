// Charts as SVG, redrawn each time. Colors are classes of style.css. Every chart describes its
// content in words (`aria-label`).

import { html, shown, svg } from "./dom.js";

const LEFT = 44; // px for the numbers of the vertical axis
const BOTTOM = 18; // px for the horizontal axis
const TOP = 14; // px for marks
const LETTER = 6.2; // approximate px of a letter in 11 px text

/** Rounds up to a number that is round itself, as is its half. */
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

/** Fills a legend with entries: name, number, color. */
export function legend(list, entries) {
  list.replaceChildren(
    ...entries.map(([name, value, colour]) =>
      html("li", {}, html("i", { class: colour }), `${name} `, html("b", {}, value)),
    ),
  );
}

/**
 * Draws lines over time. `points`: [{time, ...values}] with null for unknown values; `lines`:
 * [[value's name, color]]; `marks`: [{time, text}]; `span`: seconds shown.
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

/** Returns the runs of points in which this value is known. */
function parts(points, name) {
  const runs = [[]];
  for (const point of points) {
    if (point[name] === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  return runs.filter((part) => part.length);
}

/** Draws bars: [[name, value]]. Names that are too long are slanted. */
export function bars(chart, label, entries, colour) {
  const { width, height } = begin(chart, label);
  const most = round(Math.max(1, ...entries.map(([, value]) => value)));
  const step = (width - LEFT) / Math.max(entries.length, 1);
  const longest = LETTER * Math.max(0, ...entries.map(([name]) => name.length));
  const isSlanted = longest > step - 4;
  const bottom = isSlanted ? BOTTOM + 0.6 * longest : BOTTOM;
  axis(chart, width, height, most, bottom);
  entries.forEach(([name, value], index) => {
    const tall = (value / most) * (height - TOP - bottom);
    const x = LEFT + index * step;
    const y = height - bottom - tall;
    const size = { x: x + 1, y, width: Math.max(step - 2, 1), height: tall };
    chart.append(svg("rect", { class: colour, ...size }, svg("title", {}, `${name}: ${value}`)));
    const at = [x + step / 2, height - bottom + 14];
    const said = word(...at, name, isSlanted ? "end" : "middle");
    if (isSlanted) said.setAttribute("transform", `rotate(-40 ${at.join(" ")})`);
    chart.append(said);
  });
}

/** Draws one bar of parts: [[name, value, color]]. */
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

/** Draws a grid in which every kind has cells in proportion: [[name, count, color]]. */
export function grid(chart, label, entries) {
  const { width, height } = begin(chart, label);
  const total = entries.reduce((sum, [, count]) => sum + count, 0);
  const size = 14; // px of a cell
  const across = Math.floor(width / size);
  const cells = Math.min(across * Math.floor(height / size), total);
  let from = 0;
  let done = 0;
  for (const [, count, colour] of entries) {
    done += count;
    // every kind that occurs has at least one cell
    const to = Math.max(Math.round((done / total) * cells), count ? from + 1 : from);
    for (let cell = from; cell < to; cell += 1) {
      const x = (cell % across) * size;
      const y = Math.floor(cell / across) * size;
      chart.append(svg("rect", { class: colour, x, y, width: size - 2, height: size - 2, rx: 2 }));
    }
    from = to;
  }
}
