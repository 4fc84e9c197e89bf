// Shows one answer as it arrives, and measures its speed.

import { CallsList } from "./calls.js";
import { make } from "./dom.js";
import { Drafts, MarkedText } from "./drafts.js";
import { TokenText } from "./tokens.js";

const REASONS = { stop: "", tool_calls: "calls a tool", length: "cut at max_tokens" };
const TOO_LONG = "context_length_exceeded"; // the server's code for a prompt that leaves no room for an answer

export class Answer {
  text = "";
  explanation = null; // what the engine did for it, once it has ended by itself
  error = null; // what ended the answer early, unless the reader did
  body = make("div", { className: "answer" });
  stats = make("span", { className: "stats" });
  #written; // shows the text: MarkdownText or PlainText
  #calls = new CallsList();
  #reasoning = make("pre");
  #tokens = null; // shows the answer's tokens or drafts, if the page asked for them: TokenText or MarkedText
  #has = {}; // which of the two it asked for: {probabilities, drafts}
  #usage = null;

  constructor(written) {
    this.#written = written;
    this.body.append(written.element, this.#calls.element);
  }

  /** Returns the calls of tools that the answer consists of: {id, name, arguments}. */
  get calls() {
    return this.#calls.calls;
  }

  /** Makes an answer from its `saved` form. */
  static restored(written, { text, calls, stats, error }) {
    const answer = new Answer(written);
    answer.text = text;
    answer.stats.textContent = stats;
    written.update(text);
    for (const call of calls ?? []) answer.#calls.add(call);
    if (error) answer.#fail(new Error(error));
    return answer;
  }

  /** Returns the form to save. It has no tokens, because they are many times larger than the text. */
  get saved() {
    return { text: this.text, calls: this.calls, stats: this.stats.textContent, error: this.error?.message ?? "" };
  }

  /** Shows chunks until they end, fail or are stopped. `read` returns a choice's {text, tokens, calls, reasoning, spans}. */
  async fill(chunks, read, { colours, alternatives, marks, contextLength }) {
    const drafts = marks ? new Drafts() : null;
    if (alternatives) this.#tokens = new TokenText(alternatives, drafts);
    else if (drafts) this.#tokens = new MarkedText(drafts);
    this.#has = { probabilities: alternatives !== null, drafts: marks };
    this.show(this.#has);
    const times = { sent: performance.now(), first: null, last: null };
    let firstCount = 1;
    let reason = "";
    this.body.classList.add("growing");
    this.body.ariaBusy = "true"; // the last paragraph is replaced often: screen readers read it when it is complete
    try {
      for await (const chunk of chunks) {
        this.#usage = chunk.usage ?? this.#usage;
        this.stats.style.setProperty("--request", colours.of(chunk.id));
        const choice = chunk.choices[0];
        if (!choice) continue;
        const { text: piece, tokens, calls = [], reasoning = "", spans } = read(choice);
        if (piece || tokens.length || calls.length || reasoning) {
          times.last = performance.now();
          if (times.first === null) [times.first, firstCount] = [times.last, chunk.usage?.completion_tokens ?? 1];
        }
        this.explanation = choice.explanation ?? this.explanation;
        this.text += piece;
        this.#written.update(this.text);
        drafts?.add(spans);
        this.#think(reasoning, drafts);
        this.#tokens?.add(piece, tokens);
        for (const call of calls) this.#calls.grow(call);
        reason = REASONS[choice.finish_reason] ?? choice.finish_reason ?? reason;
        this.stats.textContent = summary(times, this.#usage, firstCount, reason);
      }
      if (this.fills(contextLength)) reason = "context full";
    } catch (error) {
      if (error.name === "AbortError") reason = "stopped";
      else this.#fail(error);
    } finally {
      this.#tokens?.finish();
      this.body.classList.remove("growing");
      this.body.ariaBusy = null;
    }
    this.stats.textContent = summary(times, this.#usage, firstCount, reason);
  }

  /** Whether the answer did not fit into the context, or ended because the context was full. */
  fills(contextLength) {
    if (this.isTooLong) return true;
    const { prompt_tokens: read = 0, completion_tokens: written = 0 } = this.#usage ?? {};
    return read + written >= contextLength;
  }

  /** Whether the server refused the conversation up to the question because it was too long. */
  get isTooLong() {
    return this.error?.code === TOO_LONG;
  }

  /** Shows the text by its tokens or drafts if they are wanted and if the answer has them, otherwise as it reads best. */
  show({ probabilities, drafts }) {
    if (!this.#tokens) return;
    const showsTokens = this.#has.probabilities && probabilities;
    const isWanted = showsTokens || (this.#has.drafts && drafts);
    const [shown, hidden] = isWanted ? [this.#tokens, this.#written] : [this.#written, this.#tokens];
    hidden.element.replaceWith(shown.element);
    if (showsTokens) this.body.tabIndex = 0; // the arrow keys move from token to token
    else this.body.removeAttribute("tabindex");
  }

  #think(text, drafts) {
    if (text && !this.#reasoning.isConnected) {
      const summary = make("summary", {}, "Reasoning");
      this.body.prepend(make("details", { className: "reasoning", open: true }, summary, this.#reasoning));
    }
    this.#reasoning.append(...(text && drafts ? drafts.marked(text) : [text]));
  }

  #fail(error) {
    this.error = error;
    this.body.append(make("p", { className: "error", role: "alert" }, error.message));
  }
}

function summary({ sent, first, last }, usage, firstCount, reason) {
  const parts = [];
  if (first !== null) parts.push(`first token ${Math.round(first - sent)} ms`);
  if (usage) {
    const { prompt_tokens: read, completion_tokens: written, prompt_tokens_details: details } = usage;
    const rate = (1000 * (written - firstCount)) / (last - first); // the first token's time is that of the prompt
    if (rate > 0 && rate < Infinity) parts.push(`${rate.toFixed(1)} tokens/s`);
    parts.push(`${read} in (${details?.cached_tokens ?? 0} cached)`, `${written} out`);
  }
  return [...parts, reason].filter(Boolean).join(" · ");
}
