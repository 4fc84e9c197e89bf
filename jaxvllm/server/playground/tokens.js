// Shows text as tokens, shaded by probability, with the alternatives that the model considered.

import { make } from "./dom.js";

const SLACK = 8; // the most characters between two tokens, from tokens that are only part of a character

/** Matches tokens with their text. The text may come later: parts of characters and of stop strings are held back. */
export class TokenText {
  element = make("span", { className: "tokens" });
  #alternatives;
  #drafts;
  #rest = ""; // text without tokens yet
  #waiting = []; // tokens without text yet
  #decoder = new TextDecoder();

  /** `drafts` say which tokens are to be marked, unless they are null. */
  constructor(alternatives, drafts) {
    this.#alternatives = alternatives;
    this.#drafts = drafts;
  }

  /** `tokens` are OpenAI's: {token, logprob, bytes, top_logprobs}. */
  add(text, tokens) {
    this.#rest += text;
    for (const token of tokens) {
      const said = token.bytes ? this.#decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token;
      this.#waiting.push({ token, said });
    }
    while (this.#waiting.length && !this.#waiting[0].said.startsWith(this.#rest)) this.#place();
    if (this.#waiting[0]?.said === this.#rest) this.#place();
  }

  /** Ends the text. Text without a token stays plain; tokens without text (such as EOS) are dropped. */
  finish() {
    while (this.#waiting.length && this.#rest) this.#place();
    this.element.append(this.#rest);
    this.#rest = "";
  }

  #place() {
    const { token, said } = this.#waiting.shift();
    const length = end(this.#rest, said) || end(this.#rest, said.trimStart()); // answers lose a leading space
    if (!length) return;
    const text = this.#rest.slice(0, length);
    const span = this.#alternatives.span(text, token);
    span.classList.toggle("draft", this.#drafts?.cut(text).every(({ accepted }) => accepted) ?? false);
    this.element.append(span);
    this.#rest = this.#rest.slice(length);
  }
}

// Returns where `said` ends in `text`, or 0 if it does not begin near the start.
function end(text, said) {
  const at = said ? text.slice(0, said.length + SLACK).indexOf(said) : -1;
  return at < 0 ? 0 : at + said.length;
}

/** The box with a token's alternatives. The reader opens it by pointer, touch or arrow keys. */
export class Alternatives {
  #box;
  #tokens = new WeakMap();

  constructor(box, root) {
    this.#box = box;
    root.addEventListener("pointerover", (event) => this.#show(event.target));
    root.addEventListener("pointerleave", () => this.#show(null));
    root.addEventListener("focusin", (event) => this.#show(event.target));
    root.addEventListener("focusout", () => this.#show(null));
    root.addEventListener("scroll", () => this.#show(null), { capture: true });
    root.addEventListener("keydown", (event) => this.#move(event));
  }

  span(text, token) {
    const span = make("span", { className: "token", tabIndex: -1 }, text);
    span.style.setProperty("--doubt", (1 - Math.exp(token.logprob)).toFixed(3));
    span.setAttribute("aria-describedby", this.#box.id);
    this.#tokens.set(span, token);
    return span;
  }

  #move(event) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const to = this.#tokens.has(event.target) ? event.target[step] : event.target.querySelector(":scope > .tokens > .token");
    if (!step || !this.#tokens.has(to)) return;
    to.focus();
    event.preventDefault();
  }

  #show(target) {
    const token = this.#tokens.get(target);
    this.#box.hidden = !token;
    if (!token) return;
    const others = token.top_logprobs.filter((other) => other.token !== token.token);
    this.#box.replaceChildren(...[token, ...others].map((shown) => line(shown, shown === token)));
    const { left, top, bottom } = target.getClientRects()[0];
    const { width, height } = this.#box.getBoundingClientRect();
    this.#box.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    this.#box.style.top = `${bottom + height + 12 < innerHeight ? bottom + 6 : top - height - 6}px`;
  }
}

function line({ token, logprob }, chosen) {
  const shown = token.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "(nothing)";
  const share = Math.exp(logprob);
  const percent = share < 0.0005 ? "<0.1%" : `${(100 * share).toFixed(1)}%`;
  const className = chosen ? "alternative chosen" : "alternative";
  const line = make("div", { className }, make("code", {}, shown), make("span", {}, percent));
  line.style.setProperty("--share", share.toFixed(4));
  return line;
}
