// Chats that this browser stores, each under its own name, so that two tabs do not overwrite each
// other's chats.
//
// A chat: {id, time, system, messages}. A message: {role, content}. An answer may also have
// `reasoning`, `calls` [{id, name, arguments}], `tokens`, `seconds`, `draws`, `ended`, `isCut` and
// `seed`. A tool's message has `callId`.

import { forget, keep, kept, namesOf } from "./store.js";

const MOST = 50; // older chats are removed
const TITLE = 48; // characters

export const newConversation = () => ({
  id: crypto.getRandomValues(new Uint32Array(2)).join("-"),
  time: Date.now(),
  system: "",
  messages: [],
});

/** Returns all stored chats, newest first: [{id, title}]. */
export function conversations() {
  return namesOf("chat ")
    .map((name) => kept(name))
    .filter(isConversation)
    .sort((one, other) => other.time - one.time)
    .map((each) => ({ id: each.id, title: titleOf(each) }));
}

export const titleOf = ({ messages }) =>
  (messages.find(({ role }) => role === "user")?.content ?? "New chat").trim().slice(0, TITLE);

/** Returns the chat that was shown last, or a new one. */
export function latest() {
  return conversationOf(kept("latest chat")) ?? newConversation();
}

/** Returns the chat with this id, or null. */
export function conversationOf(id) {
  const chat = kept(`chat ${id}`);
  return isConversation(chat) ? chat : null;
}

/** Stores a chat unless it is empty. Returns false if the browser refused. */
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

/** Returns the messages in the format of a request. */
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
