// Chats as this browser keeps them, each under its own name, so that two tabs do not overwrite each
// other's.
//
// A chat: {id, time, system, messages}. A message: {role, content}; an answer's may have `reasoning`,
// `calls` [{id, name, arguments}], `tokens`, `seconds`, `draws`, `ended`, `isCut`, `seed`; a tool's
// has `callId`.

import { forget, keep, kept, namesOf } from "./store.js";

const MOST = 50; // older ones are forgotten
const TITLE = 48; // characters

export const newConversation = () => ({
  id: crypto.getRandomValues(new Uint32Array(2)).join("-"),
  time: Date.now(),
  system: "",
  messages: [],
});

/** All that are kept, the newest first: [{id, title}]. */
export function conversations() {
  return namesOf("chat ")
    .map((name) => kept(name))
    .filter(isConversation)
    .sort((one, other) => other.time - one.time)
    .map((each) => ({ id: each.id, title: titleOf(each) }));
}

export const titleOf = ({ messages }) =>
  (messages.find(({ role }) => role === "user")?.content ?? "New chat").trim().slice(0, TITLE);

/** The chat that was shown last, or a new one. */
export function latest() {
  return conversationOf(kept("latest chat")) ?? newConversation();
}

/** The chat of this id; null where there is none. */
export function conversationOf(id) {
  const found = kept(`chat ${id}`);
  return isConversation(found) ? found : null;
}

/** Keeps a chat and returns whether the browser did; one without messages needs no place. */
export function keepConversation(conversation) {
  if (!conversation.messages.length) return true;
  const isKept = keep(`chat ${conversation.id}`, conversation);
  for (const { id } of conversations().slice(MOST)) removeConversation(id);
  return isKept;
}

export const removeConversation = (id) => forget(`chat ${id}`);

const isConversation = (value) =>
  typeof value?.id === "string" &&
  typeof value.system === "string" &&
  Array.isArray(value.messages) &&
  value.messages.every(isMessage);

const ROLES = ["user", "assistant", "tool"];

export const isMessage = (value) =>
  ROLES.includes(value?.role) &&
  typeof value.content === "string" &&
  (value.calls === undefined || (Array.isArray(value.calls) && value.calls.every(isCall)));

const isCall = (value) =>
  [value?.id, value?.name, value?.arguments].every((each) => typeof each === "string");

/** The messages as a request has them. */
export function asSent(system, messages) {
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  return [...first, ...messages.map(sent)];
}

function sent({ role, content, calls, callId }) {
  if (role === "tool") return { role, content, tool_call_id: callId };
  if (!calls?.length) return { role, content };
  const made = calls.map((each) => ({
    id: each.id,
    type: "function",
    function: { name: each.name, arguments: each.arguments },
  }));
  return { role, content: content || null, tool_calls: made };
}
