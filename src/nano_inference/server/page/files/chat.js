// A conversation, with one answer at a time. The browser stores it.

import { byId, button, html, onSecondPress, report } from "./dom.js";
import {
  asSent,
  conversationOf,
  conversations,
  isMessage,
  keepConversation,
  latest,
  newConversation,
  removeConversation,
  titleOf,
} from "./conversations.js";
import { linkTo } from "./links.js";
import { MessageView } from "./messages.js";
import { about, drawn, ending, newSeed, roomFor, served } from "./server.js";
import { Settings } from "./settings.js";
import { keep, keepText } from "./store.js";

const EXAMPLES = [
  "What is the capital of France?",
  "Explain what a hash table is, in three sentences.",
  "Write a Python function that reverses a string.",
];
const NEAR = 80; // px from the end of the page within which scrolling follows a growing answer

let settings;
let conversation = latest();
let views = []; // of the conversation's messages
let abort = null; // controller of the current answer

// -- the screen -----------------------------------------------------------------------------------

const problem = (text) => report(byId("chat-problem"), text);

const save = () => {
  keep("latest chat", conversation.id);
  if (!keepConversation(conversation)) problem("This browser has no space left to store the chat.");
};

function show() {
  const { messages } = conversation;
  views = messages.map((message, index) => new MessageView(message, actsOf(index)));
  byId("messages").replaceChildren(...views.map(({ root }) => root));
  byId("chat-empty").hidden = messages.length > 0;
  byId("chat-system").value = conversation.system;
  listChats();
}

function listChats() {
  const current = { id: conversation.id, title: titleOf(conversation) };
  const all = conversations().map((each) => (each.id === current.id ? current : each));
  if (!all.includes(current)) all.unshift(current);
  byId("chats").replaceChildren(...all.map(({ id, title }) => html("option", { value: id }, title)));
  byId("chats").value = conversation.id;
  byId("chat-delete").disabled = !conversation.messages.length;
}

function open(other) {
  abort?.abort();
  keepConversation(conversation);
  conversation = other;
  keep("latest chat", other.id);
  problem("");
  show();
}

/** Returns the actions of the message at this index. */
function actsOf(index) {
  const before = () => conversation.messages.slice(0, index);
  return {
    edit: (text) => answer([...before(), { role: "user", content: text }]),
    again: () => answer(before()),
    resume: () => answer(before(), conversation.messages[index]),
    // only until the model has continued from the results
    result: isLastAnswer(index) ? (callId, text) => takeResult(index, callId, text) : undefined,
    linkOf: () => linkOf(index),
  };
}

const isLastAnswer = (index) =>
  conversation.messages.findLastIndex(({ role }) => role === "assistant") === index;

/** Takes in a call's result. Once all calls of the answer have one, the model continues. */
function takeResult(index, callId, text) {
  const { messages } = conversation;
  const results = messages
    .slice(index + 1)
    .filter((each) => each.role === "tool" && each.callId !== callId);
  results.push({ role: "tool", callId, content: text });
  const next = [...messages.slice(0, index + 1), ...results];
  if (messages[index].calls.every(({ id }) => results.some((each) => each.callId === id))) {
    answer(next);
    return;
  }
  conversation.messages = next;
  save();
  show();
}

function linkOf(index) {
  const { messages, system } = conversation;
  const asked = messages.slice(0, index).findLastIndex(({ role }) => role === "user");
  const earlier = messages.slice(0, Math.max(asked, 0));
  return linkTo({
    p: messages[asked]?.content ?? "",
    ...settings.texts(),
    seed: messages[index].seed,
    system,
    earlier: earlier.length ? JSON.stringify(earlier) : "",
  });
}

// -- answers --------------------------------------------------------------------------------------

/** Returns the request for an answer to these messages. `begun`: an answer to continue. */
async function requestOf(messages, begun, signal) {
  const fields = settings.body({ takesTools: true });
  const history = begun ? [...messages, { role: "assistant", content: begun.content }] : messages;
  const prompt = { model: byId("pick").value || undefined, messages: asSent(conversation.system, history) };
  if (fields.tools) prompt.tools = fields.tools;
  if (begun) Object.assign(prompt, { continue_final_message: true, add_generation_prompt: false });
  fields.max_tokens ??= await roomFor(prompt, settings.mostTokens, signal);
  fields.seed ??= begun?.seed ?? newSeed();
  return { ...prompt, ...fields, stream: true, return_token_ids: true };
}

/** Generates an answer to these messages. It replaces all later messages. */
async function answer(messages, begun = null) {
  abort?.abort();
  const controller = (abort = new AbortController());
  const chat = conversation;
  const former = { messages: chat.messages, text: byId("message").value };
  const message = begun
    ? { ...begun, draws: (begun.draws ?? 1) + 1 }
    : { role: "assistant", content: "", tokens: 0, seconds: 0, draws: 1 };
  Object.assign(message, { ended: undefined, isCut: false });
  const before = message.tokens;
  chat.messages = [...messages, message];
  keep("latest chat", chat.id);
  problem("");
  show();
  running(true);
  follow(true);
  try {
    const body = await requestOf(messages, begun, controller.signal);
    message.seed = body.seed;
    await take(drawn("v1/chat/completions", body, controller.signal), message);
  } catch (failure) {
    const isStopped = controller.signal.aborted;
    Object.assign(message, { ended: isStopped ? "stopped" : "cut off", isCut: true });
    if (message.tokens === before && chat.messages.at(-1) === message) {
      chat.messages = former.messages; // no tokens arrived: restore the conversation
      if (chat === conversation) giveBack(messages.at(-1), former);
    }
    if (!isStopped && chat === conversation) problem(failure.message);
  } finally {
    keepConversation(chat);
    if (abort === controller) {
      running(false);
      if (chat === conversation) finished();
    }
  }
}

/** Puts a message that was not sent back into its field. */
function giveBack(asked, former) {
  const isNew = asked?.role === "user" && !former.messages.includes(asked);
  if (isNew && !byId("message").value) byId("message").value = asked.content;
  fit();
}

function finished() {
  if (views.at(-1)?.message === conversation.messages.at(-1)) views.at(-1).draw();
  else show();
  listChats();
}

/** Takes in the events of an answer. */
async function take(events, message) {
  const before = message.seconds;
  let began = null;
  for await (const { choices } of events) {
    for (const choice of choices) {
      add(message, choice);
      if (choice.token_ids?.length) began ??= performance.now();
      if (began !== null) message.seconds = before + (performance.now() - began) / 1000;
      if (choice.finish_reason) {
        message.ended = ending(choice, message.tokens);
        message.isCut = choice.finish_reason === "length";
      }
    }
    redraw(message);
  }
}

function add(message, { delta, token_ids: ids }) {
  message.tokens += ids?.length ?? 0;
  message.content += delta.content ?? "";
  if (delta.reasoning_content) {
    message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  }
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[index] ??= { id: id ?? "", name: "", arguments: "" });
    call.name += called.name ?? "";
    call.arguments += called.arguments ?? "";
  }
}

let isDue = false;

/** Redraws a growing answer, at most once per frame. */
function redraw(message) {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (views.at(-1)?.message !== message) return; // another chat is shown
    views.at(-1).draw();
    follow(false);
  });
}

/** Keeps the end of the conversation visible, unless the reader has scrolled away from it. */
function follow(always) {
  const page = document.documentElement;
  const left = page.scrollHeight - page.clientHeight - page.scrollTop;
  if (always || left < NEAR + (views.at(-1)?.root.lastElementChild?.offsetHeight ?? 0)) {
    scrollTo({ top: page.scrollHeight });
  }
}

function running(is) {
  byId("send").hidden = is;
  byId("chat-halt").hidden = !is;
  byId("messages").setAttribute("aria-busy", String(is));
  if (!is) abort = null;
}

// -- the form -------------------------------------------------------------------------------------

/** Fits the field's height to its text, within limits. */
function fit() {
  const area = byId("message");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight / 3)}px`;
}

function send() {
  const area = byId("message");
  if (abort) return;
  if (!area.value.trim()) {
    problem("Write a message first.");
    area.focus();
    return;
  }
  const asked = { role: "user", content: area.value };
  area.value = "";
  keep("chat draft", "");
  fit();
  answer([...conversation.messages, asked]);
}

/** Fills in a new chat from a link. The reader sends it. */
function fill({ p, system = "", earlier, view: _, ...texts }) {
  const chat = newConversation();
  chat.system = system;
  chat.messages = earlierOf(earlier);
  open(chat);
  settings.fill(texts);
  byId("chat-settings").open = Boolean(system || Object.keys(texts).length);
  byId("message").value = p;
  fit();
  byId("message").focus();
}

function earlierOf(text) {
  try {
    const messages = JSON.parse(text);
    return Array.isArray(messages) && messages.every(isMessage) ? messages : [];
  } catch {
    return [];
  }
}

function startBar() {
  byId("chats").addEventListener("change", () => {
    open(conversationOf(byId("chats").value) ?? newConversation());
  });
  byId("chat-new").addEventListener("click", () => {
    open(newConversation());
    byId("message").focus();
  });
  onSecondPress(byId("chat-delete"), () => {
    abort?.abort();
    removeConversation(conversation.id);
    conversation = newConversation();
    open(conversationOf(conversations()[0]?.id) ?? conversation);
  });
  byId("chat-reset").addEventListener("click", () => settings.reset());
  byId("chat-system").addEventListener("input", () => {
    conversation.system = byId("chat-system").value;
    save();
  });
}

/** Starts the view. Returns the function that fills in a link. */
export function startChat() {
  settings = new Settings("chat", {
    shown: ["temperature", "max_tokens", "top_p", "seed"],
    hints: { max_tokens: 1024 },
    without: ["n"],
  });
  served.addEventListener("known", () => settings.expect(about.sampling));
  const area = byId("message");
  keepText(area, "chat draft");
  area.addEventListener("input", fit);
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("say").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("chat-halt").addEventListener("click", () => abort?.abort());
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("chat").hidden) abort?.abort();
  });
  addEventListener("pagehide", () => {
    const last = conversation.messages.at(-1);
    if (abort && last) Object.assign(last, { ended: "stopped", isCut: true });
    keepConversation(conversation);
  });
  byId("chat-examples").append(
    ...EXAMPLES.map((text) => {
      const use = () => {
        area.value = text;
        keep("chat draft", text);
        fit();
        area.focus();
      };
      return html("li", {}, button(text, use, { class: "example" }));
    }),
  );
  startBar();
  show();
  return fill;
}
