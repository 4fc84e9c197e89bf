// Copies text to the clipboard.

import { make } from "./dom.js";

/** Copies, and returns whether it worked. Browsers have `navigator.clipboard` only for https and local pages. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text);
  }
}

function copySelection(text) {
  const focused = document.activeElement;
  const field = make("textarea", { value: text, className: "copied" });
  document.body.append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  focused?.focus({ preventScroll: true });
  return isDone;
}
