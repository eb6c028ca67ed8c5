// Common parts of all views: switching between them, the server's state, the API key.

import { ask, key, keys, Refused, useKey } from "./api.js";
import { startChat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { byId, html, shown } from "./dom.js";
import { takeLink } from "./links.js";
import { showRequests } from "./requests.js";
import { startSamples } from "./samples.js";
import { about, learn } from "./server.js";

const PERIOD = 1000; // ms between checks of the server
const PATIENCE = 5000; // ms to wait for its answers

const dashboard = new Dashboard();

const VIEWS = { "#/samples": "samples", "#/playground": "samples", "#/dashboard": "dashboard" };

function showView() {
  const wanted = VIEWS[location.hash] ?? "chat";
  for (const view of document.querySelectorAll("main")) view.hidden = view.id !== wanted;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (wanted === "dashboard") dashboard.draw();
}

/** Shows the server's state; `state` is "ok", "wait" or "bad". */
function say(state, text, detail = "") {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text; // do not read the same text aloud
  status.dataset.state = state;
  status.title = detail;
}

/** Returns the model's name, number type and context. */
function identity() {
  const { model, dtype, quantization, max_model_len: context } = about;
  const type = [dtype, quantization && `weights ${quantization}`].filter(Boolean).join(", ");
  return [model.split("/").pop(), type, `context ${shown(context)}`].filter(Boolean).join(" · ");
}

async function nameModels() {
  await learn();
  const { data } = await (await ask("v1/models")).json();
  const pick = byId("pick");
  const picked = pick.value;
  pick.replaceChildren(
    ...data.map(({ id, parent }) =>
      html("option", { value: id }, parent ? `${id} (adapter)` : id.split("/").pop()),
    ),
  );
  if (data.some(({ id }) => id === picked)) pick.value = picked;
  byId("pick-label").hidden = data.length < 2;
}

async function lookAtRequests() {
  const reply = await ask("requests", { signal: AbortSignal.timeout(PATIENCE) });
  showRequests((await reply.json()).data);
}

/** The status shown for the code of a 503. */
const NOT_READY = {
  starting: "starting the engine…",
  engine_restarting: "restarting the engine…",
};

/** Polls the server as long as the page is open. The server may die and come back. */
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
      dashboard.take(stats, metrics);
      if (!byId("dashboard").hidden) await lookAtRequests();
      if (stats.restarting) say("wait", "restarting the engine…");
      else if (stats.status === "ok") say("ok", identity(), "The server is ready.");
      else say("bad", stats.status);
    } catch (problem) {
      named = false;
      dashboard.miss();
      if (problem instanceof Refused && [401, 403].includes(problem.status)) {
        say("bad", "API key required", problem.message);
        await new Promise((done) => keys.addEventListener("changed", done, { once: true }));
        continue;
      }
      const state = problem instanceof Refused ? NOT_READY[problem.code] : undefined;
      say("wait", state ?? "reconnecting…", problem.message);
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

/** Fills in the form from a link, on opening the page and when its address changes. */
function follow(views) {
  const fields = takeLink();
  if (fields) views[fields.view === "samples" ? "samples" : "chat"](fields);
}

startKeys();
const views = { chat: startChat(), samples: startSamples() };
follow(views);
addEventListener("hashchange", () => {
  follow(views);
  showView();
});
showView();
watch();
