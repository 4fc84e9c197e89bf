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
// The forms that an answer may be made to have, by their field of `structured_outputs`. Each has an example to begin with.
const FORMS = {
  json: {
    example: JSON.stringify(
      {
        type: "object",
        properties: { name: { type: "string", maxLength: 12 }, age: { type: "integer", minimum: 0, maximum: 99 } },
        required: ["name", "age"],
        additionalProperties: false,
      },
      null,
      1,
    ),
    read: JSON.parse,
  },
  json_object: { read: () => true },
  choice: { example: "yes\nno\nmaybe", read: (text) => text.split("\n").filter(Boolean) },
  regex: { example: "[0-2][0-9]:[0-5][0-9]", read: (text) => text },
};
const TOOLS = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Tells the weather in a city",
        parameters: {
          type: "object",
          properties: { city: { type: "string", enum: ["Paris", "Rome", "Oslo"] } },
          required: ["city"],
        },
      },
    },
  ],
  null,
  1,
);

export class Settings {
  alternatives = ALTERNATIVES;
  #form;

  constructor(form) {
    this.#form = form;
    form.querySelector("#sliders").append(...SLIDERS.map(row));
    form.addEventListener("submit", (event) => event.preventDefault());
    const { form: kind, constraint, tools } = form.elements;
    kind.addEventListener("change", () => {
      const example = FORMS[kind.value]?.example;
      constraint.hidden = example === undefined;
      constraint.value = example ?? "";
      this.#check();
    });
    for (const field of [constraint, tools]) field.addEventListener("input", () => this.#check());
    form.querySelector("#tools-example").addEventListener("click", () => {
      tools.value = TOOLS;
      this.#check();
    });
  }

  /** Returns whether every field can be sent, and shows the first that cannot. */
  isValid() {
    return this.#form.reportValidity();
  }

  get probabilities() {
    return this.#form.elements.probabilities.checked;
  }

  /** Whether accepted drafts are to be marked. Where there are none, there is no switch. */
  get drafts() {
    const { drafts } = this.#form.elements;
    return drafts.checked && !drafts.parentElement.hidden;
  }

  get system() {
    return this.#form.elements.system.value.trim();
  }

  /** Returns the functions that a chat's model may call. */
  get tools() {
    const text = this.#form.elements.tools.value.trim();
    return text ? JSON.parse(text) : [];
  }

  /** Returns a request's fields for both endpoints. Without max_tokens, an answer may fill the model's context. */
  sampling() {
    const fields = this.#form.elements;
    const values = Object.fromEntries(SLIDERS.map(({ name }) => [name, fields[name].valueAsNumber]));
    if (values.max_tokens === Number(fields.max_tokens.max)) delete values.max_tokens;
    if (fields.seed.value) values.seed = fields.seed.valueAsNumber;
    const stops = fields.stop.value.split("\n").filter(Boolean);
    if (stops.length) values.stop = stops.map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    const kind = fields.form.value;
    if (kind) values.structured_outputs = { [kind]: FORMS[kind].read(fields.constraint.value) };
    return values;
  }

  // Marks a field whose text is no JSON, so that the form cannot be sent.
  #check() {
    const { form: kind, constraint, tools } = this.#form.elements;
    constraint.setCustomValidity(problem(kind.value === "json" ? constraint.value : ""));
    tools.setCustomValidity(problem(tools.value));
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

// Returns what is wrong with a text that should be JSON, or "" when it is empty or nothing is wrong.
function problem(text) {
  if (!text.trim()) return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
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
