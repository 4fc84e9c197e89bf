// The calls of tools in one answer, each with its name and its arguments as they arrive.

import { make } from "./dom.js";

export class CallsList {
  element = make("div", { className: "calls" });
  calls = [];
  #bodies = [];

  /** Shows a whole call: {id, name, arguments}. */
  add(call) {
    this.calls.push(call);
    this.#bodies.push(make("code", {}, call.arguments));
    const head = make("div", { className: "bar" }, `calls ${call.name}`);
    this.element.append(make("div", { className: "code call" }, head, make("pre", {}, this.#bodies.at(-1))));
  }

  /** Takes a part of a streamed call: the first has id and name, the others add to the arguments. */
  grow({ index, id, function: { name, arguments: text = "" } = {} }) {
    if (index === this.calls.length) this.add({ id, name, arguments: "" });
    this.calls[index].arguments += text;
    this.#bodies[index].append(text);
  }
}
