// What is common to both views: which one is shown, the server's state, its key.

import { ask, key, keys, Refused, useKey } from "./api.js";
import { Dashboard } from "./dashboard.js";
import { byId, html } from "./dom.js";
import { startPlayground } from "./playground.js";

const PERIOD = 1000; // ms between two looks at the server
const PATIENCE = 5000; // ms that it may take to answer

const dashboard = new Dashboard();

function showView() {
  const wanted = location.hash === "#/dashboard" ? "dashboard" : "playground";
  for (const view of document.querySelectorAll("main")) view.hidden = view.id !== wanted;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (wanted === "dashboard") dashboard.draw();
}

/** Says how the server is; `state` is "ok", "wait" or "bad". */
function say(state, text, detail = "") {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text; // else it is read aloud again
  status.dataset.state = state;
  status.title = detail;
}

async function nameModels() {
  const { data } = await (await ask("v1/models")).json();
  const pick = byId("pick");
  const picked = pick.value;
  pick.replaceChildren(
    ...data.map(({ id, parent }) =>
      html("option", { value: id }, parent ? `${id} (adapter)` : id.split("/").pop()),
    ),
  );
  if (data.some(({ id }) => id === picked)) pick.value = picked;
}

/** Look at the server for as long as the page is open. It may die and come again meanwhile. */
async function watch() {
  let named = false;
  for (;;) {
    try {
      const signal = AbortSignal.timeout(PATIENCE);
      const [stats, metrics] = await Promise.all([
        ask("stats", { signal }).then((reply) => reply.json()),
        ask("metrics", { signal }).then((reply) => reply.text()),
      ]);
      if (!named) await nameModels();
      named = true;
      byId("model").textContent = stats.model.split("/").pop();
      dashboard.take(stats, metrics);
      if (stats.restarting) say("wait", "the engine starts again…");
      else say(stats.status === "ok" ? "ok" : "bad", stats.status);
    } catch (problem) {
      named = false;
      dashboard.miss();
      if (problem instanceof Refused && [401, 403].includes(problem.status)) {
        say("bad", "a key is needed", problem.message);
        await new Promise((done) => keys.addEventListener("changed", done, { once: true }));
        continue;
      }
      say("wait", "reconnecting…", problem.message);
    }
    await new Promise((done) => setTimeout(done, PERIOD));
  }
}

function startKeys() {
  const dialog = byId("key-dialog");
  const open = () => {
    if (dialog.open) return;
    byId("key").value = "";
    dialog.showModal();
  };
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close();
    useKey(byId("key").value.trim());
  });
  byId("key-forget").addEventListener("click", () => {
    dialog.close();
    useKey("");
  });
  byId("key-button").addEventListener("click", open);
  const offer = () => (byId("key-button").hidden = false);
  if (key()) offer();
  keys.addEventListener("needed", () => {
    offer();
    open();
  });
}

startKeys();
startPlayground();
addEventListener("hashchange", showView);
showView();
watch();
