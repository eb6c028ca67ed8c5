// Settings, drafts and chats, stored by the browser as JSON in localStorage. Keys are never stored.
// The page also works if the browser stores nothing (a private window, a full disk).

import { ROOT } from "./api.js";

const PREFIX = `nano-inference ${ROOT.pathname} `; // separates servers behind one proxy

/** Returns the value of this name, or null if there is none or it is unreadable. */
export function kept(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}

/** Stores a value. Returns false if the browser refused. */
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
    // nothing was stored
  }
}

/** Returns the names that begin with `start`. */
export function namesOf(start) {
  try {
    return Object.keys(localStorage)
      .filter((each) => each.startsWith(PREFIX + start))
      .map((each) => each.slice(PREFIX.length));
  } catch {
    return [];
  }
}

/** Makes the text of a field survive a reload. */
export function keepText(field, name) {
  const before = kept(name);
  if (typeof before === "string") field.value = before;
  field.addEventListener("input", () => keep(name, field.value));
}
