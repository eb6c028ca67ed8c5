// What is known of the server: the model, its context and its defaults, as `/page/settings` has it.

import { ask, events } from "./api.js";

/** Tells of "known" whenever the server has been asked anew. */
export const served = new EventTarget();

// {model, dtype, quantization, max_model_len, max_samples, eos_token_ids, sampling, tool_format}
export let about = null;

export async function learn() {
  about = await (await ask("page/settings")).json();
  served.dispatchEvent(new Event("known"));
}

/** A seed for a request that has none, so that it can be asked again. */
export const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

/** Tokens that an answer may have: `most`, or as many as the context has room for. */
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

/** The events of a streamed answer. */
export async function* drawn(path, body, signal) {
  yield* events(await ask(path, { body, signal }));
}

/** In words why an answer of so many tokens ended. `choice`: what the server said last of it. */
export function ending(choice, count) {
  const { finish_reason: reason, stop_reason: stop } = choice;
  if (reason === "length") return `cut at ${count} tokens`;
  if (reason === "stop" && typeof stop === "string") return `finished at ${JSON.stringify(stop)}`;
  if (reason === "abort" && typeof stop === "string") return `ended by the server: ${stop}`;
  return { stop: "finished", tool_calls: "calls a tool", abort: "ended by the server" }[reason];
}
