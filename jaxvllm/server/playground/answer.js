// One answer as it arrives: its text, and how fast it came.

import { make } from "./dom.js";
import { TokenText } from "./tokens.js";

const REASONS = { stop: "", length: "cut at max_tokens" };

export class Answer {
  text = "";
  error = null; // what ended it early, unless the reader did
  body = make("div", { className: "answer" });
  stats = make("span", { className: "stats" });

  /** Shows chunks until they end, fail or are stopped. `read` gives a choice's {text, tokens}. */
  async fill(chunks, read, colours, alternatives) {
    const text = alternatives && new TokenText(this.body, alternatives);
    if (alternatives) this.body.tabIndex = 0; // arrow keys go from token to token
    const times = { sent: performance.now(), first: null, last: null };
    let usage = null;
    let firstCount = 1;
    let reason = "";
    this.body.classList.add("growing");
    try {
      for await (const chunk of chunks) {
        usage = chunk.usage ?? usage;
        this.stats.style.setProperty("--request", colours.of(chunk.id));
        const choice = chunk.choices[0];
        if (!choice) continue;
        const { text: piece, tokens } = read(choice);
        if (piece || tokens.length) {
          times.last = performance.now();
          if (times.first === null) [times.first, firstCount] = [times.last, chunk.usage?.completion_tokens ?? 1];
        }
        this.text += piece;
        if (text) text.add(piece, tokens);
        else this.body.append(piece);
        reason = REASONS[choice.finish_reason] ?? choice.finish_reason ?? reason;
        this.stats.textContent = summary(times, usage, firstCount, reason);
      }
    } catch (error) {
      if (error.name === "AbortError") reason = "stopped";
      else this.error = error;
    } finally {
      text?.finish();
      this.body.classList.remove("growing");
    }
    this.stats.textContent = summary(times, usage, firstCount, reason);
    if (this.error) this.body.append(make("p", { className: "error", role: "alert" }, this.error.message));
  }
}

function summary({ sent, first, last }, usage, firstCount, reason) {
  const parts = [];
  if (first !== null) parts.push(`first token ${Math.round(first - sent)} ms`);
  if (usage) {
    const { prompt_tokens: read, completion_tokens: written, prompt_tokens_details: details } = usage;
    const rate = (1000 * (written - firstCount)) / (last - first); // the first token's time is the prompt's
    if (rate > 0 && rate < Infinity) parts.push(`${rate.toFixed(1)} tokens/s`);
    parts.push(`${read} in (${details?.cached_tokens ?? 0} cached)`, `${written} out`);
  }
  return [...parts, reason].filter(Boolean).join(" · ");
}
