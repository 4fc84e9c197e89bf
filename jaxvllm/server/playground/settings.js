// The form beside the conversation, and the fields that it adds to a request.

import { make } from "./dom.js";

const SLIDERS = [
  { name: "temperature", min: 0, max: 2, step: 0.01, value: 0.7, title: "0: always the most probable token" },
  { name: "top_p", min: 0.01, max: 1, step: 0.01, value: 1, title: "keep the most probable tokens up to this probability" },
  { name: "top_k", min: 0, max: 200, step: 1, value: 0, title: "keep this many of the most probable tokens; 0: all" },
  { name: "min_p", min: 0, max: 1, step: 0.01, value: 0, title: "keep tokens with at least this share of the best one's probability" },
  { name: "max_tokens", min: 1, max: 1024, step: 1, value: 1024, title: "the most tokens of an answer; all the way up: as many as the context holds" },
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

  /** Returns whether every field can be sent, and shows the first that cannot. */
  isValid() {
    return this.#form.reportValidity();
  }

  get probabilities() {
    return this.#form.elements.probabilities.checked;
  }

  get system() {
    return this.#form.elements.system.value.trim();
  }

  /** Returns a request's fields for both endpoints. Without max_tokens, an answer may fill the model's context. */
  sampling() {
    const fields = this.#form.elements;
    const values = Object.fromEntries(SLIDERS.map(({ name }) => [name, fields[name].valueAsNumber]));
    if (values.max_tokens === Number(fields.max_tokens.max)) delete values.max_tokens;
    if (fields.seed.value) values.seed = fields.seed.valueAsNumber;
    const stops = fields.stop.value.split("\n").filter(Boolean);
    if (stops.length) values.stop = stops.map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    return values;
  }

  /** Limits answers to the model's context. A slider at its maximum stays there. */
  limit(maxTokens) {
    for (const input of this.#form.querySelectorAll("[data-of=max_tokens]")) {
      const isAtTop = input.value === input.max;
      input.max = maxTokens;
      if (isAtTop || input.valueAsNumber > maxTokens) input.value = maxTokens;
    }
  }
}

// Connects a slider and a number field. The number has the name, because its value is sent.
function row({ name, title, ...range }) {
  const number = make("input", { type: "number", id: name, name, required: true, ...range });
  const slider = make("input", { type: "range", ariaLabel: name, ...range });
  slider.addEventListener("input", () => (number.value = slider.value));
  number.addEventListener("input", () => (slider.value = number.value));
  for (const input of [number, slider]) input.dataset.of = name;
  return make("div", { className: "slider", title }, make("label", { htmlFor: name }, name), slider, number);
}
