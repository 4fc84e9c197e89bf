// Elements, always from text: nothing a server or a model says is ever read as HTML.

export const byId = (id) => document.getElementById(id);

/** A new element with these properties and children; a string among the children is text. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A button that does what its class says, see main.js. */
export const button = (className, text) => make("button", { className, type: "button" }, text);
