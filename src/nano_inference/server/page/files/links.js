// Links that fill in a form: `#p=PROMPT&seed=7&temperature=0.2...`. What stands behind `#` is sent to
// no server, and nothing is asked of the model before the reader says so.

/** A link to this page that fills in `fields`; empty ones are left out. */
export function linkTo(fields) {
  const parts = Object.entries(fields).filter(([, value]) => value !== "" && value !== undefined);
  const here = new URL(location.href);
  here.hash = new URLSearchParams(parts.map(([name, value]) => [name, String(value)])).toString();
  return here.href;
}

/** What this page's address fills in, or null; asked once, it is taken out of the address. */
export function takeLink() {
  const hash = location.hash.slice(1);
  if (!hash || hash.startsWith("/")) return null;
  const fields = Object.fromEntries(new URLSearchParams(hash));
  if (fields.p === undefined) return null;
  history.replaceState(null, "", fields.view === "samples" ? "#/samples" : "#/chat");
  return fields;
}
