// The engine's state from `/stats` and `/metrics`, and its history. A replacement engine counts
// from 0 again, and an unreachable server reports nothing: then lines have gaps, and the last known
// numbers stay.

import { metricsOf } from "./api.js";
import { bars, grid, legend, overTime, stack } from "./charts.js";
import { byId, html, shown, shownSeconds, svg } from "./dom.js";

const SPAN = 300; // maximum seconds shown
const LEAST = 60; // minimum seconds shown
const RECENT = 60; // seconds of the prefix hit rate

// id -> its title, the histogram
const LATENCIES = {
  first: ["Time to first token", "time_to_first_token_seconds"],
  between: ["Between tokens", "inter_token_latency_seconds"],
  whole: ["End to end", "e2e_request_latency_seconds"],
};
const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];

export class Dashboard {
  #points = []; // one per poll: {time, generated, prompts, running, waiting, engine}
  #marks = []; // new weight versions
  #metrics = new Map();

  constructor() {
    for (const [id, [title]] of Object.entries(LATENCIES)) {
      const heading = html("h2", { id: `${id}-title` }, title);
      const note = html("p", { class: "note", id: `${id}-note` });
      const parts = [heading, svg("svg", { id, class: "chart" }), note];
      const about = { class: "card", "aria-labelledby": heading.id };
      byId("drafts-card").before(html("section", about, ...parts));
    }
  }

  /** Takes in the JSON of `/stats` and the text of `/metrics`. */
  take(stats, metrics) {
    const time = performance.now() / 1000;
    const { engine } = stats;
    if (!engine) return this.miss();
    this.#metrics = metricsOf(metrics);
    const before = this.#points.at(-1);
    const known = this.#points.findLast((point) => point.engine);
    if (known && known.engine.weight_version !== engine.weight_version) {
      this.#marks.push({ time, text: `v${engine.weight_version}` });
    }
    // a rate needs the previous poll of the same engine
    const rate = (count) => {
      const grown = before?.engine ? count(engine) - count(before.engine) : -1;
      return grown < 0 ? null : grown / (time - before.time);
    };
    this.#points.push({
      time,
      engine,
      generated: rate((each) => each.completion_tokens),
      prompts: rate((each) => each.prompt_tokens_computed),
      running: engine.num_running,
      waiting: engine.num_waiting + engine.num_held,
    });
    this.#forget(time);
    this.draw();
  }

  /** Records a poll without an answer. */
  miss() {
    const time = performance.now() / 1000;
    const nothing = { generated: null, prompts: null, running: null, waiting: null };
    this.#points.push({ time, engine: null, ...nothing });
    this.#forget(time);
    this.draw();
  }

  #forget(time) {
    const newest = this.#points.findLast((point) => point.engine);
    this.#points = this.#points.filter((each) => each.time > time - SPAN || each === newest);
  }

  /** Draws everything, if the dashboard is visible. */
  draw() {
    const newest = this.#points.findLast((point) => point.engine);
    if (byId("dashboard").hidden || !newest) return;
    this.#drawNumbers(newest);
    this.#drawTime(newest);
    this.#drawBlocks(newest.engine);
    this.#drawPhases(newest.engine);
    for (const [id, [, name]] of Object.entries(LATENCIES)) this.#drawLatency(id, name);
    this.#drawDrafts(newest.engine.speculation);
  }

  #drawNumbers({ generated, running, waiting, engine }) {
    const say = (id, text) => (byId(id).textContent = text);
    const cached = engine.prompt_tokens_cached;
    say("running", shown(running));
    say("waiting", shown(waiting));
    say("speed", shown(generated));
    const old = this.#points.find((each) => each.engine && each.time > this.#now - RECENT).engine;
    const hits = cached - old.prompt_tokens_cached;
    const asked = hits + engine.prompt_tokens_computed - old.prompt_tokens_computed;
    const isFresh = hits >= 0 && asked > 0;
    say("hits", `${Math.round(100 * (isFresh ? hits / asked : engine.hit_rate))} %`);
    say("hits-since", isFresh ? "prefix hits, 1 min" : "prefix hits, total");
    say("preemptions", shown(engine.num_preemptions));
    say("version", String(engine.weight_version));
  }

  get #now() {
    return this.#points.findLast((point) => point.engine).time;
  }

  #drawTime({ generated, prompts, running, waiting }) {
    legend(byId("throughput-legend"), [
      ["sampled", shown(generated), "c1"],
      ["prompt, computed", shown(prompts), "c2"],
    ]);
    const shownFor = this.#now - this.#points[0].time;
    const span = Math.min(Math.max(shownFor, LEAST), SPAN);
    const ago = (time) => `${Math.round(this.#now - time)} s ago`;
    const versions = this.#marks.map(({ time, text }) => `weights ${text}, ${ago(time)}`);
    this.#fold("throughput", ["prompts", "generated"], !versions.length);
    this.#fold("load", ["running", "waiting"], true);
    overTime(
      byId("throughput"),
      ["Tokens a second over the last minutes", ...versions].join("; "),
      this.#points,
      [
        ["prompts", "c2"],
        ["generated", "c1"],
      ],
      this.#marks,
      span,
    );
    byId("versions").replaceChildren(...versions.map((text) => html("li", {}, text)));
    legend(byId("load-legend"), [
      ["running", shown(running), "c3"],
      ["waiting", shown(waiting), "c4"],
    ]);
    const lines = [
      ["running", "c3"],
      ["waiting", "c4"],
    ];
    overTime(byId("load"), "Sequences over the last minutes", this.#points, lines, [], span);
  }

  /** Shows a sentence instead of an empty chart. */
  #fold(id, names, mayBeIdle) {
    const isIdle = mayBeIdle && !this.#points.some((each) => names.some((name) => each[name]));
    byId(id).toggleAttribute("hidden", isIdle);
    byId(`${id}-legend`).hidden = isIdle;
    byId(`${id}-idle`).hidden = !isIdle;
  }

  #drawBlocks(engine) {
    const held = engine.num_blocks - engine.num_free_blocks;
    const kinds = [
      ["shared", engine.num_shared_blocks, "c5"],
      ["used by one", held - engine.num_shared_blocks, "c1"],
      ["cached", engine.num_cached_blocks, "c2"],
      ["free", engine.num_free_blocks - engine.num_cached_blocks, "c0"],
    ];
    const counts = kinds.map(([name, count, colour]) => [name, shown(count), colour]);
    legend(byId("kv-legend"), counts);
    grid(byId("kv"), counts.map(([name, count]) => `${count} ${name}`).join(", "), kinds);
  }

  #drawPhases(engine) {
    const phases = Object.entries(engine.step_microseconds)
      .filter(([, microseconds]) => microseconds > 0)
      .map(([name, value], index) => [name, value, COLOURS[index % COLOURS.length]]);
    const said = phases.map(([name, value, colour]) => [name, shownSeconds(value / 1e6), colour]);
    byId("phases").toggleAttribute("hidden", !phases.length);
    byId("phases-idle").hidden = phases.length > 0;
    legend(byId("phases-legend"), said);
    stack(byId("phases"), said.map(([name, value]) => `${name} ${value}`).join(", "), phases);
  }

  #drawLatency(id, name) {
    const { buckets, count, sum } = histogramOf(this.#metrics, name);
    const note = byId(`${id}-note`);
    byId(id).toggleAttribute("hidden", !count);
    if (!count) {
      note.textContent = "none yet";
      return;
    }
    const at = (share) => shownSeconds(quantile(buckets, share * count));
    note.textContent =
      `median about ${at(0.5)} · 95 % within ${at(0.95)} · mean ${shownSeconds(sum / count)}` +
      ` · ${shown(count)} total`;
    const first = buckets.findIndex((bucket) => bucket.count);
    const final = buckets.findLastIndex((bucket) => bucket.count);
    const entries = buckets.slice(Math.max(first - 1, 0), final + 2).map(({ most, count }) => [
      most === Infinity ? "more" : `≤ ${shownSeconds(most)}`,
      count,
    ]);
    bars(byId(id), note.textContent, entries, "c1");
  }

  #drawDrafts(drafts) {
    const root = byId("drafts");
    const sum = (numbers) => (numbers ?? []).reduce((total, each) => total + each, 0);
    const rows = Object.entries(drafts?.drafted ?? {}).map(([source, places]) => {
      const [all, good] = [sum(places), sum(drafts.accepted[source])];
      const bar = html("span", { class: "bar" });
      bar.style.setProperty("--share", String(all ? good / all : 0));
      const cells = [source, all ? `${Math.round((100 * good) / all)} %` : "–", bar];
      const counts = `${shown(good)} of ${shown(all)}`;
      return html("tr", {}, ...[...cells, counts].map((each) => html("td", {}, each)));
    });
    const none = drafts ? "none yet" : "Speculative decoding is off.";
    const table = html("table", { "aria-label": "By source" }, html("tbody", {}, ...rows));
    root.replaceChildren(rows.length ? table : html("p", { class: "note" }, none));
  }
}

/** Returns a histogram: [{most, count}], with the total `count` and `sum`. */
function histogramOf(metrics, name) {
  const total = (rows) => (rows ?? []).reduce((sum, { value }) => sum + value, 0);
  let before = 0;
  const buckets = (metrics.get(`${name}_bucket`) ?? []).map(({ labels, value }) => {
    const count = value - before;
    before = value;
    return { most: labels.le === "+Inf" ? Infinity : Number(labels.le), count };
  });
  const [count, sum] = [`${name}_count`, `${name}_sum`].map((each) => total(metrics.get(each)));
  return { buckets, count, sum };
}

/** Returns the value below which `wanted` values lie, assuming an even spread within a bucket. */
function quantile(buckets, wanted) {
  let least = 0;
  let seen = 0;
  for (const { most, count } of buckets) {
    if (seen + count >= wanted) {
      return most === Infinity ? least : least + ((most - least) * (wanted - seen)) / count;
    }
    [least, seen] = [most, seen + count];
  }
  return least;
}
