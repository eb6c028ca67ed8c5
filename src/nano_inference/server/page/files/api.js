// Requests to the server of this page.
//
// An API key is kept in sessionStorage: for this tab, until it is closed. The page's
// Content-Security-Policy ensures that data goes only to this server.

export const ROOT = new URL("..", import.meta.url); // this file is at page/api.js
const NAME = "nano-inference key";

/** Dispatches "needed" (the server answered 401) and "changed". */
export const keys = new EventTarget();

export const key = () => sessionStorage.getItem(NAME) ?? "";

export function useKey(value) {
  if (value) sessionStorage.setItem(NAME, value);
  else sessionStorage.removeItem(NAME);
  keys.dispatchEvent(new Event("changed"));
}

/** A reply with an error status. `message` and `code` are the server's. */
export class Refused extends Error {
  constructor(status, { message, code }) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Replaces a browser's own message ("Failed to fetch", "network error"), which is unspecific. */
const inWords = (message) => (problem) => {
  throw problem instanceof TypeError ? new Error(message) : problem;
};

/** Returns the reply of a path. A `body` is sent as JSON. Throws Refused, an Error if the server is
 * unreachable, and the reason of an aborted `signal`. */
export async function ask(path, { body, signal } = {}) {
  const used = key();
  const headers = used ? { authorization: `Bearer ${used}` } : {};
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { ...sent, headers, signal, cache: "no-store" };
  const reply = await fetch(new URL(path, ROOT), options).catch(
    inWords("The server cannot be reached. Try again when it is back."),
  );
  if (reply.ok) return reply;
  if (reply.status === 401 && used === key()) keys.dispatchEvent(new Event("needed"));
  throw new Refused(reply.status, await problemOf(reply));
}

async function problemOf(reply) {
  const text = await reply.text();
  try {
    const { message, code } = JSON.parse(text).error;
    return { message, code };
  } catch {
    return { message: `${reply.status} ${reply.statusText}` };
  }
}

const CUT = "Lost the connection to the server. The text shown is incomplete.";

/** Yields the parsed data of a reply's server-sent events, up to `[DONE]`. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(inWords(CUT));
    if (done) throw new Error(CUT);
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.code, event.error);
      yield event;
    }
  }
}

/** Parses Prometheus's text: name -> [{labels, value}], without our prefix. */
export function metricsOf(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const match = /^nano_inference_(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries(
      [...(match[2] ?? "").matchAll(/(\w+)="((?:\\.|[^"\\])*)"/g)].map((each) => each.slice(1)),
    );
    const rows = metrics.get(match[1]) ?? [];
    rows.push({ labels, value: Number(match[3]) });
    metrics.set(match[1], rows);
  }
  return metrics;
}
