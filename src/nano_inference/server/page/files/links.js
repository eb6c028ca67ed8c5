// Links that fill in a form: `#p=PROMPT&seed=7&temperature=0.2...`. The part after `#` never leaves
// the browser, and the model gets no request until the reader submits the form.

/** Returns a link to this page that fills in `fields`. Empty ones are left out. */
export function linkTo(fields) {
  const parts = Object.entries(fields).filter(([, value]) => value !== "" && value !== undefined);
  const here = new URL(location.href);
  here.hash = new URLSearchParams(parts.map(([name, value]) => [name, String(value)])).toString();
  return here.href;
}

/** Returns the fields in this page's address, or null, and removes them from the address. */
export function takeLink() {
  const hash = location.hash.slice(1);
  if (!hash || hash.startsWith("/")) return null;
  const fields = Object.fromEntries(new URLSearchParams(hash));
  if (fields.p === undefined) return null;
  history.replaceState(null, "", fields.view === "samples" ? "#/samples" : "#/chat");
  return fields;
}
