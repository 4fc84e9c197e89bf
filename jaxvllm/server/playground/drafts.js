// Marks what speculative decoding guessed of a text.

import { make } from "./dom.js";

/** Follows what the model writes, and finds the accepted drafts in the texts that are shown of it. */
export class Drafts {
  #written = []; // spans that were not shown yet: {text, accepted}

  /** `spans` are the server's. They come before the text, or with it. */
  add(spans) {
    this.#written.push(...spans);
  }

  /** Returns the next text that is shown as spans. It may lack some of what was written, such as the marks of reasoning. */
  cut(text) {
    const at = this.#written.map((span) => span.text).join("").indexOf(text);
    if (at < 0) return [{ text, accepted: false }];
    this.#take(at);
    return this.#take(text.length);
  }

  /** Returns the next text that is shown as nodes. */
  marked(text) {
    return this.cut(text).map((span) => (span.accepted ? make("mark", { className: "draft" }, span.text) : span.text));
  }

  // Takes so many characters from what was written.
  #take(count) {
    const taken = [];
    while (count > 0) {
      const { text, accepted } = this.#written.shift();
      taken.push({ text: text.slice(0, count), accepted });
      if (text.length > count) this.#written.unshift({ text: text.slice(count), accepted });
      count -= text.length;
    }
    return taken;
  }
}

/** Text as it is, with its drafts marked. */
export class MarkedText {
  element = make("span");
  #drafts;

  constructor(drafts) {
    this.#drafts = drafts;
  }

  add(text) {
    this.element.append(...this.#drafts.marked(text));
  }

  finish() {}
}
