// One turn of a conversation on the page: what was typed, the answer, and what can be done with the two.

import { button, make } from "./dom.js";

/** Text that is shown as it is. */
export class PlainText {
  element = make("span");
  #text = new Text();

  constructor() {
    this.element.append(this.#text);
  }

  update(text) {
    this.#text.appendData(text.slice(this.#text.length));
  }
}

export class Turn {
  element = make("article", { className: "turn" });
  prompt;
  answer;
  #asked;
  #copy = button("copy", "Copy");

  /** `editBeside`: the button that edits the prompt stands beside it, else below the answer. */
  constructor(prompt, answer, editBeside) {
    this.prompt = prompt;
    this.answer = answer;
    this.#asked = make("div", { className: "asked" }, prompt);
    const question = make("div", { className: "question" }, this.#asked);
    const foot = make("footer", {}, answer.stats, make("div", {}, this.#copy, button("retry", "Retry")));
    (editBeside ? this.#asked : this.#copy).before(button("edit", "Edit"));
    this.element.append(question, answer.body, foot);
    this.#copy.hidden = !answer.text;
  }

  get saved() {
    return { prompt: this.prompt, ...this.answer.saved };
  }

  /** The answer has ended; `offer` is a list of buttons for what may be done about a context that is full. */
  end(offer) {
    this.#copy.hidden = !this.answer.text;
    if (offer.length) this.element.append(make("p", { className: "offer" }, "The model's context is full.", ...offer));
  }

  /** Lets the reader change the prompt: a form that is submitted, or taken back by its button and by Escape. */
  edit() {
    const field = make("textarea", { ariaLabel: "Your text, changed", value: this.prompt });
    const cancel = button("cancel", "Cancel");
    const buttons = make("div", {}, cancel, make("button", { className: "again" }, "Send"));
    const form = make("form", { className: "editing" }, field, buttons);
    const takeBack = () => form.replaceWith(this.#asked);
    cancel.addEventListener("click", takeBack);
    form.addEventListener("keydown", ({ key }) => key === "Escape" && takeBack());
    this.#asked.replaceWith(form);
    field.focus();
  }
}
