// One turn of a conversation on the page: the reader's text, the answer, and the buttons for both.

import { button, make } from "./dom.js";
import { drawn } from "./explanation.js";

/** Text that is shown unchanged. */
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
  #explain = button("explain", "Explain");

  /** With `editBeside`, the button that edits the prompt is beside it, otherwise below the answer. */
  constructor(prompt, answer, editBeside) {
    this.prompt = prompt;
    this.answer = answer;
    this.#asked = make("div", { className: "asked" }, prompt);
    const question = make("div", { className: "question" }, this.#asked);
    const foot = make("footer", {}, answer.stats, make("div", {}, this.#explain, this.#copy, button("retry", "Retry")));
    (editBeside ? this.#asked : this.#explain).before(button("edit", "Edit"));
    this.element.append(question, answer.body, foot);
    this.#copy.hidden = !answer.text;
    this.#explain.hidden = true;
    this.#explain.ariaHasPopup = "dialog";
  }

  get saved() {
    return { prompt: this.prompt, ...this.answer.saved };
  }

  /** Shows that the answer has ended. `offer` is a list of buttons for a context that is full. */
  end(offer) {
    this.#copy.hidden = !this.answer.text;
    this.#explain.hidden = !this.answer.explanation;
    if (offer.length) this.element.append(make("p", { className: "offer" }, "The model's context is full.", ...offer));
  }

  /** Shows what the engine did for the answer over the whole page, until a button or Escape closes it. */
  explain() {
    const drawing = drawn(this.answer.explanation);
    if (!this.answer.explanation.tokens.some(({ candidates }) => candidates.length)) {
      const hint = "With “Token probabilities” switched on, the next answers show what else could have come, too.";
      drawing.append(make("p", { className: "facts" }, hint));
    }
    const close = button("close", "Close");
    const head = make("header", {}, make("h2", {}, "What the engine did for this answer"), close);
    const dialog = make("dialog", { className: "explained", ariaLabel: "What the engine did for this answer" }, head, drawing);
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    this.element.append(dialog);
    dialog.showModal();
    drawing.querySelector(".step").scrollIntoView({ block: "nearest" }); // low windows have no room for what is above it
  }

  /** Lets the reader change the prompt in a form, which a button or Escape cancels. */
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
