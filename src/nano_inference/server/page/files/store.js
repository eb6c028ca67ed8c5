// What the browser keeps of this page, as JSON in localStorage: settings, drafts and chats. Never a
// key. Where the browser keeps nothing (a private window, a full disk), the page works all the same.

import { ROOT } from "./api.js";

const PREFIX = `nano-inference ${ROOT.pathname} `; // servers behind one proxy do not share

/** The value of this name, or null. What cannot be read is null, too. */
export function kept(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}

/** Keeps a value; returns whether the browser did. */
export function keep(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function forget(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // there was nothing
  }
}

/** The names that begin with `start`. */
export function namesOf(start) {
  try {
    return Object.keys(localStorage)
      .filter((each) => each.startsWith(PREFIX + start))
      .map((each) => each.slice(PREFIX.length));
  } catch {
    return [];
  }
}

/** A text field whose text survives a reload. */
export function keepText(field, name) {
  const before = kept(name);
  if (typeof before === "string") field.value = before;
  field.addEventListener("input", () => keep(name, field.value));
}
