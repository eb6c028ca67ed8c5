// Properties of the server: the model, its context and its defaults, from `/page/settings`.

import { ask, events } from "./api.js";

/** Dispatches "known" whenever the properties have been fetched. */
export const served = new EventTarget();

// {model, dtype, quantization, max_model_len, max_samples, eos_token_ids, sampling, tool_format}
export let about = null;

export async function learn() {
  about = await (await ask("page/settings")).json();
  served.dispatchEvent(new Event("known"));
}

/** Returns a seed for a request without one, so that it can be repeated. */
export const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

/** Returns the maximum tokens of an answer: `most`, or the rest of the context if that is less. */
export async function roomFor(prompt, most, signal) {
  const reply = await ask("tokenize", { body: prompt, signal });
  const { count, max_model_len: context } = await reply.json();
  if (count >= context) {
    throw new Error(
      `The prompt has ${count} tokens and fills the context of ${context}. ` +
        "Shorten it, or start a new chat.",
    );
  }
  return Math.min(most, context - count);
}

/** Yields the events of a streamed answer. */
export async function* drawn(path, body, signal) {
  yield* events(await ask(path, { body, signal }));
}

/** Describes why an answer of `count` tokens ended. `choice`: its last event. */
export function ending(choice, count) {
  const { finish_reason: reason, stop_reason: stop } = choice;
  if (reason === "length") return `cut at ${count} tokens`;
  if (reason === "stop" && typeof stop === "string") return `finished at ${JSON.stringify(stop)}`;
  if (reason === "abort" && typeof stop === "string") return `ended by the server: ${stop}`;
  return { stop: "finished", tool_calls: "calls a tool", abort: "ended by the server" }[reason];
}
