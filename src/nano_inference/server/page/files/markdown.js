// Markdown as elements: paragraphs, headings, lists, quotes, tables, fenced code, emphasis, code
// and links. HTML stays text, pictures become links, and links must be http or https.
//
// Every search for an end runs over a text only once, so that hostile texts take no longer than
// others of the same length.

import { copyButton, html } from "./dom.js";

const DEEPEST = 8; // levels of quotes, lists and emphasis; deeper markup stays text

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const BAR = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

// -- blocks ---------------------------------------------------------------------------------------

// Each gets the lines from `at` on, and returns null, or a line count and the element's function.
const BLOCKS = [fence, heading, rule, quote, list, table];

function fence(lines, at) {
  const begun = FENCE.exec(lines[at]);
  if (!begun) return null;
  const mark = begun[1];
  let end = at + 1;
  const closes = (line) => {
    const said = line.trim();
    return said.length >= mark.length && said === mark[0].repeat(said.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  const count = Math.min(end + 1, lines.length) - at;
  return { count, make: () => codeBlock(code, begun[2].trim().split(/\s/)[0]) };
}

function codeBlock(code, language) {
  const head = html("figcaption", {}, html("span", {}, language || "code"), copyButton(() => code));
  const body = html("pre", { tabindex: "0" }, html("code", {}, code));
  return html("figure", { class: "code" }, head, body);
}

function heading(lines, at) {
  const match = HEADING.exec(lines[at]);
  if (!match) return null;
  const level = Math.min(match[1].length + 2, 6); // the page's own title is h1
  const text = match[2].trim().replace(/ #+$/, "");
  return { count: 1, make: () => html(`h${level}`, {}, ...inline(text)) };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { count: 1, make: () => html("hr") } : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at]) || depth >= DEEPEST) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { count: end - at, make: () => html("blockquote", {}, ...elements(inside, depth + 1)) };
}

const indentOf = (line) => line.length - line.trimStart().length;

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || depth >= DEEPEST || RULE.test(lines[at])) return null;
  const isNumbered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (!match || /\d/.test(match[2]) !== isNumbered || RULE.test(lines[end])) break;
    const taken = item(lines, end, match);
    items.push(taken.inside);
    end = taken.end;
  }
  const start = isNumbered ? { start: String(parseInt(first[2], 10)) } : {};
  const rows = () => items.map((inside) => html("li", {}, ...itemParts(inside, depth + 1)));
  return { count: end - at, make: () => html(isNumbered ? "ol" : "ul", start, ...rows()) };
}

/** Returns the lines of an item without their indentation, and the start of the next block. */
function item(lines, at, match) {
  const width = match[1].length + match[2].length + 1; // lines indented by this belong to the item
  const inside = [match[4]];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines[end + 1];
      if (next === undefined || !next.trim() || indentOf(next) < width) break;
      inside.push("");
    } else if (indentOf(line) >= Math.min(width, 2) && indentOf(line) > match[1].length) {
      inside.push(line.slice(Math.min(width, indentOf(line))));
    } else break;
  }
  // blank lines between items do not end the list
  let next = end;
  while (next < lines.length && !lines[next].trim()) next += 1;
  return { inside, end: next < lines.length && ITEM.test(lines[next]) ? next : end };
}

/** Returns the content of an item. A single paragraph is unwrapped. */
function itemParts(inside, depth) {
  const parts = elements(inside, depth);
  return parts[0]?.tagName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts;
}

function table(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return null;
  if (!BAR.test(lines[at + 1]) || cells(lines[at]).length !== cells(lines[at + 1]).length) {
    return null;
  }
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (tag) => (line) =>
    html("tr", {}, ...cells(line).map((each) => html(tag, {}, ...inline(each))));
  const make = () => {
    const head = html("thead", {}, row("th")(lines[at]));
    const body = html("tbody", {}, ...lines.slice(at + 2, end).map(row("td")));
    return html("div", { class: "scrolls", tabindex: "0" }, html("table", {}, head, body));
  };
  return { count: end - at, make };
}

function cells(line) {
  const parts = line.trim().split("|");
  if (!parts[0].trim()) parts.shift();
  if (parts.length && !parts.at(-1).trim()) parts.pop();
  return parts.map((each) => each.trim());
}

const begins = (lines, at, depth) => BLOCKS.some((block) => block(lines, at, depth));

/** A numbered list within a paragraph must begin with 1, so that years do not start a list. */
const interrupts = (lines, at, depth) =>
  !/^ *(?!1[.)])\d/.test(lines[at]) && begins(lines, at, depth);

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end += 1;
  const text = lines.slice(at, end).join("\n").trim();
  return { count: end - at, make: () => html("p", {}, ...inline(text)) };
}

/** Returns the blocks of a text: the source of each, and a function that makes its element. */
function blocksOf(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    let block = null;
    for (const each of BLOCKS) block ??= each(lines, at, depth);
    block ??= paragraph(lines, at, depth);
    blocks.push({ source: lines.slice(at, at + block.count).join("\n"), make: block.make });
    at += block.count;
  }
  return blocks;
}

const elements = (lines, depth) => blocksOf(lines, depth).map(({ make }) => make());

// -- within a line --------------------------------------------------------------------------------

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const ADDRESS = /https?:\/\/[^\s<>"'`\])*]+/y;
const STYLES = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

/** Returns the nodes of a text without blocks. */
function inline(text, depth = 0) {
  const nodes = [];
  const misses = new Set(); // marks that do not occur in the rest of the text
  let plain = "";
  let at = 0;
  const add = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  while (at < text.length) {
    const span = SPANS[text[at]]?.(text, at, depth, misses);
    if (!span) {
      plain += text[at];
      at += 1;
    } else {
      if (typeof span.node === "string") plain += span.node;
      else add(span.node);
      at = span.end;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

// by first character: null, or the node and its end
const SPANS = {
  "\\": (text, at) =>
    PUNCTUATION.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null,
  "`": code,
  "*": emphasis,
  _: emphasis,
  "~": emphasis,
  "[": (text, at, depth, misses) => link(text, at, at, depth, misses),
  "!": (text, at, depth, misses) =>
    text[at + 1] === "[" ? link(text, at, at + 1, depth, misses) : null,
  h: address,
};

/** Returns the index of `wanted` from `from` on. A miss (-1) is remembered, not searched again. */
function search(text, wanted, from, misses) {
  if (misses.has(wanted)) return -1;
  const index = text.indexOf(wanted, from);
  if (index < 0) misses.add(wanted);
  return index;
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function code(text, at, depth, misses) {
  const length = runLength(text, at);
  const mark = "`".repeat(length);
  let end = at + length;
  for (;;) {
    end = search(text, mark, end, misses);
    if (end < 0) return { node: mark, end: at + length };
    const run = runLength(text, end);
    if (run === length) break;
    end += run;
  }
  let said = text.slice(at + length, end);
  if (said.startsWith(" ") && said.endsWith(" ") && said.trim()) said = said.slice(1, -1);
  return { node: html("code", {}, said), end: end + length };
}

function emphasis(text, at, depth, misses) {
  const twice = text[at] + text[at];
  const mark = text.startsWith(twice, at) ? twice : text[at];
  const begin = at + mark.length;
  const literal = { node: mark, end: begin };
  if (!(mark in STYLES) || depth >= DEEPEST || /^\s?$/.test(text[begin] ?? "")) return literal;
  if (mark[0] === "_" && WORD.test(text[at - 1] ?? "")) return literal; // within snake_case
  const end = closing(text, mark, begin, misses);
  if (end < 0) return literal;
  const inside = inline(text.slice(begin, end), depth + 1);
  return { node: html(STYLES[mark], {}, ...inside), end: end + mark.length };
}

function closing(text, mark, from, misses) {
  if (misses.has(mark)) return -1;
  for (let end = text.indexOf(mark, from); end >= 0; ) {
    const run = runLength(text, end);
    const isLong = run === mark.length || run >= 3;
    const isBehindText = end > from && !/\s/.test(text[end - 1]);
    const isWordEnd = mark[0] !== "_" || !WORD.test(text[end + run] ?? "");
    // of `***`, the last marks belong to the outer emphasis
    if (isLong && isBehindText && isWordEnd) return end + run - mark.length;
    end = text.indexOf(mark, end + run);
  }
  misses.add(mark);
  return -1;
}

function link(text, at, bracket, depth, misses) {
  if (depth >= DEEPEST) return null;
  const close = search(text, "](", bracket, misses);
  if (close < 0 || text.slice(bracket + 1, close).includes("[")) return null;
  const end = search(text, ")", close, misses);
  if (end < 0) return null;
  // an address may contain one pair of parentheses
  const isPaired = text.slice(close + 2, end).includes("(") && text[end + 1] === ")";
  const last = isPaired ? end + 1 : end;
  const target = text.slice(close + 2, last).trim().split(/\s/)[0];
  const words = text.slice(bracket + 1, close) || target;
  const node = anchor(target, ...inline(words, DEEPEST));
  return node && { node, end: last + 1 };
}

function address(text, at) {
  if (WORD.test(text[at - 1] ?? "")) return null;
  ADDRESS.lastIndex = at;
  let url = ADDRESS.exec(text)?.[0];
  while (url && ".,;:!?".includes(url.at(-1))) url = url.slice(0, -1);
  const node = url && anchor(url, url);
  return node ? { node, end: at + url.length } : null;
}

/** Returns a link if the target is http or https. */
function anchor(target, ...words) {
  if (!/^https?:\/\//i.test(target) || !URL.canParse(target)) return null;
  const safe = { rel: "noopener noreferrer nofollow", target: "_blank", title: target };
  return html("a", { href: target, ...safe }, ...words);
}

// -- rendering ------------------------------------------------------------------------------------

/** An element whose text grows. Only changed blocks are rendered again. */
export class Markdown {
  #sources = [];

  constructor(root) {
    this.root = root;
  }

  show(text) {
    const blocks = blocksOf(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"));
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.#sources[same]) same += 1;
    while (this.root.childElementCount > same) this.root.lastElementChild.remove();
    this.root.append(...blocks.slice(same).map(({ make }) => make()));
    this.#sources = blocks.map(({ source }) => source);
  }
}
