// The table of open requests, from `/requests`.

import { byId, html, shown, shownSeconds } from "./dom.js";

const MOST = 50; // rows shown

// title, the cell's text
const COLUMNS = [
  ["Request", (row) => row.session ?? row.id],
  ["State", (row) => [row.state, reasonOf(row)].filter(Boolean).join(": ")],
  ["Age", (row) => shownSeconds(row.age)],
  ["Prompt", (row) => `${shown(row.prompt_tokens)}, ${shown(row.cached_tokens)} cached`],
  ["Sampled", (row) => shown(row.completion_tokens)],
  ["Blocks", (row) => shown(row.blocks)],
  ["Version", (row) => String(row.weight_version)],
];

const reasonOf = ({ reason, behind }) => (behind === null ? reason : `${reason} (${behind})`);

/** Shows the open requests. The longest open ones come first. */
export function showRequests(rows) {
  const sorted = rows.toSorted((a, b) => b.age - a.age);
  const heads = COLUMNS.map(([title]) => html("th", { scope: "col" }, title));
  const lines = sorted.slice(0, MOST).map((row) => {
    const cells = COLUMNS.map(([, text]) => html("td", {}, text(row)));
    const about = [row.path, row.id, row.adapter && `adapter ${row.adapter}`];
    return html("tr", { title: about.filter(Boolean).join(" · ") }, ...cells);
  });
  const table = html("table", { "aria-label": "Open requests" });
  table.append(html("thead", {}, html("tr", {}, ...heads)), html("tbody", {}, ...lines));
  const more = rows.length > MOST ? `${shown(rows.length - MOST)} more` : "";
  const note = html("p", { class: "note" }, rows.length ? more : "none");
  byId("requests").replaceChildren(...(rows.length ? [table] : []), note);
}
