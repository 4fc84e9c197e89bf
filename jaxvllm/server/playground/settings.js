// The form beside the conversation, and what it says about a request.

import { make } from "./dom.js";

const SLIDERS = [
  { name: "temperature", min: 0, max: 2, step: 0.01, value: 0.7, title: "0: always the most probable token" },
  { name: "top_p", min: 0.01, max: 1, step: 0.01, value: 1, title: "the likeliest tokens of this probability" },
  { name: "top_k", min: 0, max: 200, step: 1, value: 0, title: "so many of the likeliest tokens; 0: all" },
  { name: "min_p", min: 0, max: 1, step: 0.01, value: 0, title: "at least this share of the best one's" },
  { name: "max_tokens", min: 1, max: 1024, step: 1, value: 1024, title: "where an answer is cut; all the way up: where the model's context ends" },
];
const ALTERNATIVES = 5; // shown for each token

export class Settings {
  alternatives = ALTERNATIVES;
  #form;

  constructor(form) {
    this.#form = form;
    form.querySelector("#sliders").append(...SLIDERS.map(row));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Whether every field can be sent; shows the first that cannot. */
  isValid() {
    return this.#form.reportValidity();
  }

  get probabilities() {
    return this.#form.elements.probabilities.checked;
  }

  get system() {
    return this.#form.elements.system.value.trim();
  }

  /** The fields that a request has for both endpoints; no max_tokens: until the model's context ends. */
  sampling() {
    const fields = this.#form.elements;
    const values = Object.fromEntries(SLIDERS.map(({ name }) => [name, fields[name].valueAsNumber]));
    if (values.max_tokens === Number(fields.max_tokens.max)) delete values.max_tokens;
    if (fields.seed.value) values.seed = fields.seed.valueAsNumber;
    const stops = fields.stop.value.split("\n").filter(Boolean);
    if (stops.length) values.stop = stops.map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    return values;
  }

  /** No answer is longer than the model's context. What was all the way up stays there. */
  limit(maxTokens) {
    for (const input of this.#form.querySelectorAll("[data-of=max_tokens]")) {
      const isAtTop = input.value === input.max;
      input.max = maxTokens;
      if (isAtTop || input.valueAsNumber > maxTokens) input.value = maxTokens;
    }
  }
}

// A slider and a number that follow each other. The number has the name: it is what is sent.
function row({ name, title, ...range }) {
  const number = make("input", { type: "number", id: name, name, required: true, ...range });
  const slider = make("input", { type: "range", ariaLabel: name, ...range });
  slider.addEventListener("input", () => (number.value = slider.value));
  number.addEventListener("input", () => (slider.value = number.value));
  for (const input of [number, slider]) input.dataset.of = name;
  return make("div", { className: "slider", title }, make("label", { htmlFor: name }, name), slider, number);
}
