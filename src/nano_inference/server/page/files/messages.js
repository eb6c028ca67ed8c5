// View of one message of a chat.

import { button, copyButton, counted, html, shown } from "./dom.js";
import { Markdown } from "./markdown.js";

const WHO = { user: "You", assistant: "Answer", tool: "Result" };

/** Indents JSON. Arguments of a call that are not valid JSON (yet) stay unchanged. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export class MessageView {
  #text = null; // Markdown of an answer
  #thoughts = null;

  /**
   * `message`: as in conversations.js. `acts`: actions of the buttons by name: `edit(text)` of a
   * user's message; `again`, `resume`, `linkOf` and `result(callId, text)` of an answer.
   */
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.tools = html("div", { class: "tools" });
    this.foot = html("p", { class: "note foot" });
    this.calls = html("div", { class: "calls" });
    const label = WHO[message.role];
    this.root = html("article", { class: `message ${message.role}`, "aria-label": label });
    this.draw();
  }

  draw() {
    if (this.message.role === "assistant") this.#drawAnswer();
    else this.#drawPlain();
  }

  #drawPlain() {
    const { role, content } = this.message;
    const body = html("div", { class: "body" }, content);
    const edit = role === "user" ? [button("Edit", () => this.#edit())] : [];
    this.tools.replaceChildren(...edit, copyButton(() => content));
    this.root.replaceChildren(body, this.tools);
  }

  #edit() {
    const area = html("textarea", { rows: "3", "aria-label": "Your message" });
    area.value = this.message.content;
    const send = () => area.value.trim() && this.acts.edit(area.value);
    const cancel = () => {
      this.#drawPlain();
      this.tools.firstElementChild.focus();
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    const note = html("span", { class: "note" }, "Later messages are removed.");
    this.tools.replaceChildren(button("Send", send), button("Cancel", cancel), note);
    this.root.replaceChildren(area, this.tools);
    area.focus();
  }

  #drawAnswer() {
    const { message } = this;
    if (!this.#text) {
      this.#text = new Markdown(html("div", { class: "body markdown" }));
      this.root.replaceChildren(this.#text.root, this.calls, this.foot, this.tools);
    }
    if (message.reasoning) this.#drawThoughts(message.reasoning);
    this.#text.show(message.content);
    this.calls.replaceChildren(...(message.calls ?? []).map((call) => this.#call(call)));
    this.foot.textContent = this.#account();
    this.root.setAttribute("aria-busy", String(!message.ended));
    this.tools.replaceChildren(...(message.ended ? this.#buttons() : []));
  }

  #drawThoughts(reasoning) {
    if (!this.#thoughts) {
      const text = html("div", { class: "body" });
      this.#thoughts = { text, root: html("details", { class: "thoughts" }) };
      this.#thoughts.root.append(html("summary", {}, "Reasoning"), text);
      this.root.prepend(this.#thoughts.root);
    }
    this.#thoughts.text.textContent = reasoning;
  }

  #call({ id, name, arguments: text }) {
    const code = html("pre", { tabindex: "0" }, html("code", {}, pretty(text)));
    const head = html("figcaption", {}, html("span", {}, name), copyButton(() => text));
    const parts = [html("figure", { class: "code" }, head, code)];
    if (this.message.ended && this.acts.result) {
      const field = html("input", { "aria-label": `Result of ${name}` });
      field.placeholder = `result of ${name}, for the model`;
      const send = () => field.value.trim() && this.acts.result(id, field.value);
      field.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && !event.isComposing) send();
      });
      parts.push(html("div", { class: "composer" }, field, button("Send result", send)));
    }
    return html("div", { class: "call" }, ...parts);
  }

  /** Returns the number of tokens, the speed, and the reason of the end. */
  #account() {
    const { tokens, seconds, draws = 1, ended, calls, content, seed } = this.message;
    if (!tokens) return ended ?? "waiting…";
    const rate = seconds > 0 && tokens > draws ? (tokens - draws) / seconds : null;
    const isEmpty = ended && !content && !calls?.length;
    return [
      counted(tokens, "token"),
      rate && `${shown(rate)} tok/s`,
      isEmpty ? `${ended}, empty answer` : ended,
      ended && `seed ${seed}`,
    ]
      .filter(Boolean)
      .join(" · ");
  }

  #buttons() {
    const { content, calls, isCut } = this.message;
    const { again, resume, linkOf } = this.acts;
    const goesOn = isCut && content && !calls?.length;
    return [
      goesOn && button("Continue", resume, { class: "small" }),
      copyButton(() => content),
      button("Regenerate", again, {
        title:
          "Generate another answer and remove later messages. With a seed in the settings, it is the same again",
      }),
      copyButton(linkOf, "Link", {
        title: "Copy a link that fills in this message with its settings and seed, without sending it",
      }),
    ].filter(Boolean);
  }
}
