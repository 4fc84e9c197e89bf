// The two ways to talk to a model. Each is a list of turns: what was typed, and what the model made of it.

import { stream } from "./api.js";
import { Answer } from "./answer.js";
import { make } from "./dom.js";

/** Messages, through the model's chat template. */
export const CHAT = {
  path: "v1/chat/completions",
  hint: () => "Ask something",
  body(turns, prompt, settings) {
    const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
    for (const { prompt, answer } of turns) {
      if (answer.text) messages.push({ role: "user", content: prompt }, { role: "assistant", content: answer.text });
    }
    messages.push({ role: "user", content: prompt });
    return { messages, ...(settings.probabilities && { logprobs: true, top_logprobs: settings.alternatives }) };
  },
  read: ({ delta, logprobs }) => ({ text: delta.content ?? "", tokens: logprobs?.content ?? [] }),
};

/** One text that the model goes on with; what is typed is added to it. */
export const COMPLETION = {
  path: "v1/completions",
  hint: (turns) => (turns.length ? "Add to the text, or send nothing to go on" : "A text to go on with"),
  body(turns, prompt, settings) {
    const text = turns.map((turn) => turn.prompt + turn.answer.text).join("") + prompt;
    return { prompt: text, ...(settings.probabilities && { logprobs: settings.alternatives }) };
  },
  read: ({ text, logprobs }) => ({
    text,
    tokens: (logprobs?.tokens ?? []).map((token, i) => ({
      token,
      logprob: logprobs.token_logprobs[i],
      top_logprobs: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([token, logprob]) => ({ token, logprob })),
    })),
  }),
};

export class Conversation {
  #element;
  #mode;
  #settings;
  #colours;
  #alternatives;
  #turns = [];

  constructor(element, mode, { settings, colours, alternatives }) {
    this.#element = element;
    this.#mode = mode;
    this.#settings = settings;
    this.#colours = colours;
    this.#alternatives = alternatives;
  }

  get hint() {
    return this.#mode.hint(this.#turns);
  }

  /** An empty text asks for nothing, but lets a completion go on. */
  accepts(prompt) {
    return prompt.trim() !== "" || (this.#mode === COMPLETION && this.#turns.length > 0);
  }

  clear() {
    this.#turns = [];
    this.#element.replaceChildren();
  }

  /** Resolves to the answer, whether it is whole, stopped or failed. */
  async say(prompt, model, signal) {
    const body = { model, ...this.#settings.sampling(), ...this.#mode.body(this.#turns, prompt, this.#settings) };
    const answer = new Answer();
    this.#turns.push({ prompt, answer });
    this.#show(prompt, answer);
    const alternatives = this.#settings.probabilities ? this.#alternatives : null;
    await answer.fill(stream(this.#mode.path, body, signal), this.#mode.read, this.#colours, alternatives);
    return answer;
  }

  /** The last question again. */
  retry(model, signal) {
    this.#element.lastElementChild.remove();
    return this.say(this.#turns.pop().prompt, model, signal);
  }

  #show(prompt, answer) {
    const foot = make("footer", {}, answer.stats, make("button", { className: "retry" }, "Retry"));
    this.#element.append(
      make("article", { className: "turn" }, make("div", { className: "asked" }, prompt), answer.body, foot),
    );
    this.#element.parentElement.scrollTop = 0; // the bottom: it runs upwards, so it stays there while text comes
  }
}
